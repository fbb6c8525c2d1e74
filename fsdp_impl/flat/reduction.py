"""A unit's gradients: reduce them, accumulate them, show them to optimizers, and take the norm of all.

A gradient's way: autograd adds it up in the unsharded parameter's ``grad``; :class:`Reducer` takes it from there, and
reduces it over the ranks; :class:`Gradients` adds the result to the sharded gradients.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from fsdp_impl.common import clip, collectives, divide, dtensor, hooks, modes, ranges, streams
from fsdp_impl.common.clip import Groups, combine_over_ranks, scale_to, sharding_groups
from fsdp_impl.common.streams import Event
from fsdp_impl.common.views import Views, remember
from fsdp_impl.flat.group import FlatGroup
from fsdp_impl.flat.options import MixedPrecision

CommHook = Callable[..., None]

# Note: unreduced gradients
# Inside no_sync gradients accumulate unsharded in the leaf's `grad`, in the dtype of compute. Until they are reduced,
# the sharded parameters show them (of another shape than the parameter), so that zero_grad reaches them; the sharded
# gradients of earlier reductions are set aside meanwhile. From the root's pre-forward to its post-forward, and from the
# first gradient of a backward to its end, the sharded ones are back (FlatUnit). To zero what is shown is to zero both.


class Reducer:
    """Reduces the gradients of one group.

    Attributes:
        reduce_dtype: in which gradients are reduced, ``None`` for the dtype of compute.
        comm_hook: the user's function in place of the collectives and the division, with its state; see
            ``FullyShardedDataParallel.register_comm_hook``.
    """

    def __init__(self, group: FlatGroup, gradients: "Gradients", precision: MixedPrecision) -> None:
        self._group = group
        self._gradients = gradients
        self.reduce_dtype = precision.reduce_dtype or precision.param_dtype
        self._keep_low_precision = precision.keep_low_precision_grads
        self.comm_hook: tuple[Any, CommHook] | None = None

    @modes.without_grad
    def reduce(self, grad: torch.Tensor) -> None:
        """Average ``grad`` (1-D, ``layout.padded_numel``) over the ranks and add this rank's shard to the gradients.

        ``grad`` is memory of the current stream and is the caller's to give away: it may be written to.
        """
        group, context = self._group, self._group.context
        with ranges.named("reduce", group.label):
            context.release_reduce_inputs()
            context.release_reduce_outputs()
            contributions = grad.to(self.reduce_dtype or grad.dtype)
            streams.join(context.reduce_stream, streams.current(group.device))
            with streams.use(context.reduce_stream):
                shard = self._reduce_scatter(contributions)
                reduced = streams.record(context.reduce_stream)
            done = self._finish(shard)
            # At shard size 1 the input is the output and is read until it has been accumulated.
            context.keep_reduce_input(contributions, done if shard is contributions else reduced)

    def _reduce_scatter(self, contributions: torch.Tensor) -> torch.Tensor:
        """The summed shard, in the memory of the reduce stream."""
        group = self._group
        if self.comm_hook is not None:
            return self._call_hook(*self.comm_hook, contributions)
        division = self._division(contributions.dtype)
        divide.scale(contributions, division.before)
        if group.ranks.shard_group is None:
            return contributions
        output = torch.empty(group.shards.layout.shard_numel, dtype=contributions.dtype, device=group.device)
        collectives.reduce(output, contributions, group.ranks.shard_group, division.reduce_op, unit=group.label)
        return output

    def _call_hook(self, state: Any, hook: CommHook, contributions: torch.Tensor) -> torch.Tensor:
        if self._group.ranks.shard_group is None:
            hook(state, contributions)
            return contributions
        shard = torch.empty(
            self._group.shards.layout.shard_numel, dtype=contributions.dtype, device=contributions.device
        )
        hook(state, contributions, shard)
        return shard

    def _finish(self, shard: torch.Tensor) -> Event:
        """All-reduce, divide and accumulate; returns the event after which the gradients are there."""
        group, context = self._group, self._group.context
        replicas = group.ranks.replicas if self.comm_hook is None else None
        stream = context.all_reduce_stream if replicas is not None else context.reduce_stream
        if stream is not context.reduce_stream:
            streams.join(stream, context.reduce_stream)
        division = self._division(shard.dtype)
        with streams.use(stream):
            if replicas is not None:
                collectives.all_reduce(shard, replicas, division.all_reduce_op, unit=group.label)
            if self.comm_hook is None:
                divide.scale(shard, division.after)
            is_copying = self._accumulate(shard)
            done = streams.record(stream)
        context.note_reduced(stream, done, host_waits=is_copying)
        if stream is not context.reduce_stream:
            context.keep_reduce_output(shard, done)
        return done

    def _accumulate(self, shard: torch.Tensor) -> bool:
        """Returns whether a copy to the host may still be running, for which the host must wait."""
        flat = self._group.shards.flat
        dtype = shard.dtype if self._keep_low_precision else flat.dtype
        home = shard.to(dtype)
        params = [holder.param for holder in self._group.shards.holders()]
        may_overlap = False
        if home.device != flat.device:
            # Nothing on the host waits for a stream: what reads the copy before the end of backward must find it whole.
            is_read = (
                param.grad is not None or hooks.post_accumulate_of(param) or hasattr(param, "_in_backward_optimizers")
                for param in params
            )
            may_overlap = not any(is_read)
            pinned = torch.empty(home.size(), dtype=dtype, device=flat.device, pin_memory=True)
            home = pinned.copy_(home, non_blocking=may_overlap)
        self._gradients.add(home)
        for param in params:
            hooks.run_post_accumulate(param)
            _step_in_backward(param)
        return may_overlap

    def _division(self, dtype: torch.dtype) -> divide.Division:
        return divide.divide(dtype, self._group.ranks.size, self._group.ranks.replicate_size)


def _step_in_backward(param: torch.Tensor) -> None:
    """Run the optimizers that ``torch.distributed.optim`` has attached to ``param``, and drop the gradient."""
    for optimizer in getattr(param, "_in_backward_optimizers", ()):
        if param.grad is not None:
            optimizer.step()
            optimizer.zero_grad()


class _Shown(NamedTuple):
    """An unreduced gradient that a parameter shows, and the sharded one that it hides."""

    param: nn.Parameter
    grad: torch.Tensor
    aside: torch.Tensor | None


class _Last(NamedTuple):
    """What a reduction made and gave out in views, one for each of ``params``."""

    params: list[nn.Parameter]
    views: Views

    def current(self, params: Sequence[nn.Parameter]) -> torch.Tensor | None:
        """All of it, if these very views still are the gradients of ``params``, so that adding to it adds to them."""
        # User code may have put another parameter instead of one, or frozen it: that one's gradient stays as it is.
        if len(params) != len(self.params) or any(a is not b for a, b in zip(params, self.params, strict=True)):
            return None
        return self.views.whole(param.grad for param in params)


class Gradients:
    """The gradients of one group that optimizers see: sharded, or between reductions unreduced.

    See Note: unreduced gradients.
    """

    def __init__(self, group: FlatGroup) -> None:
        self._group = group
        # Adding to all the views that were given out is one addition.
        self._last: _Last | None = None
        # Unsharded gradients on show, with the sharded ones that they hide.
        self._shown: list[_Shown] = []

    @modes.without_grad
    def add(self, reduced: torch.Tensor) -> None:
        """Add ``reduced`` (1-D, ``layout.shard_numel``, where shards live) to the sharded gradients.

        Where there are none, views of it become the gradients.
        """
        holders = list(self._group.shards.holders())
        buffer = None if self._last is None else self._last.current([holder.param for holder in holders])
        if buffer is not None and buffer.dtype == reduced.dtype:
            buffer.add_(reduced)
            return
        given: list[nn.Parameter] = []
        parts = self._group.shards.parts(reduced) if self._group.shards.use_orig else []
        for param, which in holders:
            view = reduced if which is None else parts[which]
            if param.grad is None:
                set_grad(param, view)
                given.append(param)
            else:
                param.grad.add_(view)
        self._last = _Last(given, remember(reduced, [param.grad for param in given if param.grad is not None]))

    def show_unsharded(self) -> None:
        """Let the sharded parameters show what has accumulated unsharded; undone by :meth:`hide_unsharded`."""
        leaf = self._group.leaf
        if leaf is None or leaf.grad is None or self._shown:
            return
        for param, whole in self._wholes(leaf.grad):
            aside, param.grad = param.grad, None
            set_grad(param, whole)
            if aside is not None:
                _mark_if_zero(whole)
            self._shown.append(_Shown(param, whole, aside))

    def hide_unsharded(self) -> None:
        """Show sharded gradients again. What the user has dropped meanwhile, by ``zero_grad``, is dropped here too."""
        if not self._shown:
            return
        shown, self._shown = self._shown, []
        leaf = self._group.leaf
        kept = [entry for entry in shown if entry.param.grad is not None]
        for param, whole, aside in shown:
            grad, param.grad = param.grad, None
            if grad is None:
                if kept:
                    whole.zero_()
            elif aside is not None:
                aside.masked_fill_(_is_zeroed(whole).to(aside.device), 0)
                set_grad(param, aside)
        if not kept and leaf is not None:
            leaf.grad = None

    def _wholes(self, grad: torch.Tensor) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """The unsharded gradient by the parameters that show it: on all ranks, wherever the shard cuts."""
        shards = self._group.shards
        if not shards.use_orig:
            return [(shards.flat, grad)]
        parts = shards.layout.split(grad)
        return [(param, part) for param, part in zip(shards.originals, parts, strict=True) if param.requires_grad]


# Whether the user has zeroed a gradient on show is seen by its values: on CUDA, kernels for lists of tensors, as
# `zero_grad` of a foreach optimizer uses, count no version. The host does not wait for the answer. A gradient that is
# zero anyway, of an expert without tokens, must not look zeroed: its zeros are negative while it is on show.


def _mark_if_zero(grad: torch.Tensor) -> None:
    _real(grad).masked_fill_(grad.any().logical_not(), -0.0)


def _is_zeroed(grad: torch.Tensor) -> torch.Tensor:
    return grad.any().logical_or(_real(grad).signbit().all()).logical_not()


def _real(grad: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(grad) if grad.is_complex() else grad


def set_grad(param: nn.Parameter, grad: torch.Tensor) -> None:
    """Make ``grad`` the gradient of ``param``, also where shape, dtype or device differ from the parameter's."""
    if grad.size() == param.size() and grad.dtype == param.dtype and grad.device == param.device:
        param.grad = grad
        return
    # autograd checks what is assigned to `grad`, not what its data become.
    param.grad = torch.empty_like(param)
    param.grad.data = grad


@torch.no_grad()
def clip_grad_norm(
    groups: Sequence[FlatGroup],
    params: Iterable[nn.Parameter],
    device: torch.device,
    rank: int,
    max_norm: float,
    p: float,
) -> torch.Tensor:
    """See ``FullyShardedDataParallel.clip_grad_norm_``.

    ``groups`` are those of all units under the root, in the same order on every rank, ``params`` all parameters there:
    gradients that no unit manages count as equal on all ranks.
    """
    if not p >= 0:
        raise ValueError(f"norm_type should be at least 0, not {p}")
    by_groups: dict[Groups, list[torch.Tensor]] = {(): []}
    grads: list[torch.Tensor] = []
    for group in groups:
        grads += [holder.param.grad for holder in group.shards.holders() if holder.param.grad is not None]
        for spread, part in _parts(group):
            # Every rank makes the same entries, also for what it has no part of: each entry means collectives.
            members = by_groups.setdefault(spread, [])
            if part is not None:
                members.append(part)
    managed = {param for group in groups for param in (group.shards.flat, *group.shards.originals)}
    for param in params:
        if param not in managed and param.grad is not None:
            grad = dtensor.local_part(param.grad)
            by_groups.setdefault(sharding_groups(param.grad), []).append(grad)
            grads.append(grad)
    shares = {spread: clip.local_share(members, p, device, foreach=True) for spread, members in by_groups.items()}
    # Half precision is scaled by a factor of float32, float64 by one of its own.
    wide = reduce(torch.promote_types, [grad.dtype for grad in grads], torch.float32)
    total = clip.finish(combine_over_ranks(shares, p), p, wide)
    scale_to(grads, max_norm, total, foreach=True)
    if not grads:
        # Another rank's gradients may have another dtype; asking would cost a collective at each step.
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {rank} with no gradients -- returning the total norm in the "
            f"default dtype {total.dtype}",
            stacklevel=4,
        )
        return total
    return total.to(reduce(torch.promote_types, [grad.dtype for grad in grads]))


def _parts(group: FlatGroup) -> Iterator[tuple[Groups, torch.Tensor | None]]:
    """This rank's parts of the gradients, by the ranks that they are spread over; ``None`` where it has none."""
    shards = group.shards
    data_parallel = () if group.ranks.shard_group is None else (group.ranks.shard_group,)
    if not any(shards.specs):
        for holder in shards.holders():
            yield data_parallel, holder.param.grad
        yield data_parallel, None
        return
    for index, (spec, span) in enumerate(zip(shards.specs, shards.spans, strict=True)):
        beside: Groups = ()
        if spec is not None:
            beside = tuple(
                spec.mesh.get_group(dim)
                for dim, placement in enumerate(spec.placements)
                if not isinstance(placement, Replicate)
            )
        if shards.use_orig:
            part = shards.originals[index].grad if span.numel else None
        else:
            grad = shards.flat.grad
            part = grad[span.offset : span.offset + span.numel] if grad is not None else None
        yield (*data_parallel, *beside), part
