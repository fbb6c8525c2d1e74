"""The way of a gradient, from autograd to the optimizer.

Autograd leaves gradients on unsharded parameters. They are accumulated there while nothing is reduced (``accumulate``),
or taken (``take``), copied in, reduce-scattered over the shards and all-reduced over the replicas (``Reducer``), and
added to the gradients of the sharded parameters (``Accumulator``).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor, Partial

from fsdp_impl.common import collectives, divide, dtensor, hooks, modes, ranges, streams
from fsdp_impl.common.private import AsyncCollectiveTensor, chunk_cat, foreach_add_, foreach_copy_
from fsdp_impl.common.streams import Event, Stream
from fsdp_impl.common.views import Views, remember
from fsdp_impl.per_parameter.group import ParamGroup
from fsdp_impl.per_parameter.layout import BufferLayout, build_layout, shard_view, shard_views
from fsdp_impl.per_parameter.options import Buffers
from fsdp_impl.per_parameter.param import ShardedParam, UnshardedDTensor
from fsdp_impl.per_parameter.shards import Shards

# Unsharded gradients


@modes.without_grad
def accumulate(group: ParamGroup) -> None:
    """Keep the gradients of a backward that does not reduce, in the reduce dtype: sums in a low precision lose bits."""
    for param in group.shards.params:
        _accumulate_one(param, _reduce_dtype(group, param))


@modes.without_grad
def take(group: ParamGroup) -> tuple[list[ShardedParam], list[torch.Tensor]]:
    """Take the gradients that autograd left on unsharded parameters, and the parameters that have one."""
    if group.options.reduce_unused:
        _check_zeros(group)
    params: list[ShardedParam] = []
    grads: list[torch.Tensor] = []
    for param in group.shards.params:
        grad = _take_one(group, param)
        if grad is None and group.options.reduce_unused and param.sharded.requires_grad:
            grad = torch.zeros(param.size, dtype=param.compute_dtype, device=group.device)
        if grad is not None:
            params.append(param)
            grads.append(grad)
    return params, grads


def drop(group: ParamGroup) -> None:
    """Forget all unsharded gradients."""
    for param in group.shards.params:
        param.accumulated = None
        if param.unsharded is not None:
            param.unsharded.grad = None


def _accumulate_one(param: ShardedParam, dtype: torch.dtype | None) -> None:
    """Add the unsharded gradient, if there is one, to those of earlier backwards, in ``dtype``.

    What is added is not rounded to ``dtype`` first: only the sum is.
    """
    grad = None if param.unsharded is None else param.unsharded.grad
    if param.unsharded is None or grad is None:
        return
    modes.check_plain(grad, param.fqn)
    if param.accumulated is not None:
        # In the dtype of now: a cast of the parameter may have changed it.
        now = dtype or torch.promote_types(param.accumulated.dtype, grad.dtype)
        param.accumulated = param.accumulated.to(now).add_(grad)
    elif dtype != grad.dtype:
        # Of any dtype too: to one that stays, autograd adds the next in its dtype.
        param.accumulated = grad.to(dtype or grad.dtype)
    else:
        return  # it stays where it is, and autograd adds to it
    param.unsharded.grad = None


def _take_one(group: ParamGroup, param: ShardedParam) -> torch.Tensor | None:
    """Take the gradient of all backwards since the last reduction, ``None`` if there is none.

    A plain tensor of ``size``, in the dtype that it has until it is copied in. A tensor-parallel gradient that is a
    pending sum over its mesh is summed here, in the reduce dtype: a sum in the dtype of compute would lose what the
    reduce dtype is for.
    """
    if param.accumulated is not None:
        _accumulate_one(param, _reduce_dtype(group, param))
        grad, param.accumulated = param.accumulated, None
    elif param.unsharded is not None and param.unsharded.grad is not None:
        modes.check_plain(param.unsharded.grad, param.fqn)
        grad, param.unsharded.grad = param.unsharded.grad, None
    else:
        return None
    if param.unsharded_form is None:
        return grad
    form = param.unsharded_form
    return _local_grad(form.gradient(grad, param.fqn), form, _reduce_dtype(group, param))


def _local_grad(grad: DTensor, form: UnshardedDTensor, dtype: torch.dtype | None) -> torch.Tensor:
    wanted = form.wanted(grad)
    if grad.placements != wanted:
        if any(isinstance(placement, Partial) for placement in grad.placements):
            grad = cast(DTensor, grad.to(dtype or grad.dtype))
        grad = grad.redistribute(placements=wanted)
    local = dtensor.local_of(grad)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


# The dtypes in which gradients are reduced


def _reduce_dtype(group: ParamGroup, param: ShardedParam) -> torch.dtype | None:
    """The dtype in which gradients of ``param`` are reduced, and in which they add up until then: the policy's, or that
    of the sharded gradient; ``None`` is whichever autograd computes.

    Asked each time, not settled once: parameters may be cast, frozen and unfrozen in between.
    """
    return group.precision.reduce_dtype or param.grad_dtype


def _common_dtype(group: ParamGroup, params: Sequence[ShardedParam], grads: Sequence[torch.Tensor]) -> torch.dtype:
    """The one dtype in which ``grads``, of ``params``, are reduced together: what their reduce dtypes promote to.

    The dtypes that they have now may be others, and differ between ranks: one may have added up, another is new.
    Parameters of several dtypes, of which one was thawed late, are a ``ValueError``.
    """
    if group.shards.layout.dtype == torch.uint8 and len({param.dtype for param in params}) > 1:
        found = {param.fqn: param.dtype for param in params}
        raise ValueError(f"FSDP reduces the gradients of a group together and expects one dtype, but got {found}")
    if group.precision.reduce_dtype is not None:
        return group.precision.reduce_dtype
    # Each once: a promotion for every parameter would add up.
    dtypes = dict.fromkeys([param.grad_dtype or grad.dtype for param, grad in zip(params, grads, strict=True)])
    return functools.reduce(torch.promote_types, dtypes)


def _check_zeros(group: ParamGroup) -> None:
    """Refuse zeros of no dtype, on every rank: only ranks that do not use a parameter reduce zeros for it."""
    for param in group.shards.params:
        if param.sharded.requires_grad and _reduce_dtype(group, param) is None:
            raise ValueError(
                f"Gradients of {param.fqn} may be of any dtype (grad_dtype=None), so set_reduce_scatter_unused_params "
                "needs a MixedPrecisionPolicy with a reduce_dtype"
            )


# Reductions


# Layouts that are kept of the shards of parameters that have had gradients together. To make one takes the host longer
# than to find it, and few subsets come again.
_MAX_LAYOUTS = 64


class Reduced(NamedTuple):
    """Sums of the gradients of ``params``: ``shards`` is 1-D, laid out as ``layout``, of the reduce dtype."""

    params: tuple[ShardedParam, ...]
    layout: BufferLayout
    shards: torch.Tensor


class Reducer:
    """Reduces the gradients of one group.

    Attributes:
        is_unreduced: whether a backward has left gradients unreduced, or has not told whether it left any.
    """

    def __init__(self, group: ParamGroup) -> None:
        self._group = group
        self._accumulator = Accumulator(group.shards)
        # Shards that replicas have not summed yet, in the memory of the reduce stream.
        self._partial: Reduced | None = None
        self.is_unreduced = False
        self._layouts: dict[tuple[Any, ...], BufferLayout] = {}

    @modes.without_grad
    def reduce(self, params: Sequence[ShardedParam], grads: list[torch.Tensor]) -> None:
        """Average ``grads`` (unsharded sizes) over the ranks and add each shard to ``param.sharded.grad``.

        Empties ``grads``, to free them as soon as they are copied in. With replicas and without
        ``options.all_reduce_grads`` the shards are kept, and added to the next ones.
        """
        group, comm = self._group, self._group.comm
        completes_partial = self._partial is not None and group.options.all_reduce_grads
        if not params and not completes_partial:
            return
        with ranges.named("reduce", group.label):
            comm.release_reduce_inputs()
            comm.release_reduce_outputs()
            contributions, layout = self._copy_in(params, grads) if params else (None, None)
            streams.join(comm.reduce_stream, streams.current(group.device))
            with streams.use(comm.reduce_stream):
                summed = None
                if contributions is not None and layout is not None:
                    summed = Reduced(tuple(params), layout, self._reduce_scatter(contributions, layout))
                reduced = streams.record(comm.reduce_stream)
                total = self._with_partial(summed)
            if group.mesh.replicas is not None and not group.options.all_reduce_grads:
                self._partial, done = total, streams.record(comm.reduce_stream)
                comm.note_reduced(comm.reduce_stream, done)
            else:
                done = self._finish(total)
            if contributions is not None:
                # At shard size 1 the input is the output and is read until it has been accumulated (see Note: reduction
                # memory).
                comm.keep_reduce_input(contributions, done if total.shards is contributions else reduced)

    @property
    def is_partial(self) -> bool:
        """Whether there are shards that replicas have not summed."""
        return self._partial is not None

    def check_all_reduces(self) -> None:
        """Raise if the end of backward would leave shards that replicas have not summed."""
        group, options = self._group, self._group.options
        defers = self.is_unreduced and options.reduce_grads and not options.all_reduce_grads
        stays = self.is_partial and not (options.reduce_grads and options.all_reduce_grads)
        if stays or (group.mesh.replicas is not None and defers):
            raise RuntimeError(f"finalize_backward of partial reductions: set_requires_all_reduce(True), {group.label}")

    def reset(self) -> None:
        """Forget gradients that were not reduced, and shards that replicas have not summed."""
        self._partial = None
        self.is_unreduced = False

    def _copy_in(self, params: Sequence[ShardedParam], grads: list[torch.Tensor]) -> tuple[torch.Tensor, BufferLayout]:
        """In the memory of the current stream, on which autograd made the gradients that are copied in."""
        layout = self._layout(params, _common_dtype(self._group, params, grads))
        contributions = self._allocate(layout.world * layout.numel, layout.dtype)
        _pack(params, grads, layout, contributions)
        grads.clear()
        return contributions, layout

    def _reduce_scatter(self, contributions: torch.Tensor, layout: BufferLayout) -> torch.Tensor:
        """The summed shards: 1-D of ``layout``, in the memory of the reduce stream."""
        group = self._group
        division = self._division(layout.dtype)
        divide.scale(contributions, division.before)
        if group.mesh.size == 1:
            return contributions
        output = self._allocate(layout.numel, layout.dtype)
        process_group = group.options.reduce_group
        assert process_group is not None
        comm = group.options.reduce_scatter
        if comm is None or isinstance(comm, Buffers):
            collectives.reduce(output, contributions, process_group, division.reduce_op, unit=group.label)
        else:
            comm(output_tensor=output, input_tensor=contributions, group=process_group, op=division.reduce_op)
        return output

    def _finish(self, total: Reduced) -> Event:
        """All-reduce, divide and accumulate; returns the event after which the gradients are there."""
        group, comm = self._group, self._group.comm
        stream = self._all_reduce_stream()
        division = self._division(total.layout.dtype)
        if stream is not comm.reduce_stream:
            streams.join(stream, comm.reduce_stream)
        with streams.use(stream):
            if group.mesh.replicas is not None:
                collectives.all_reduce(total.shards, group.mesh.replicas, division.all_reduce_op, unit=group.label)
            if group.options.all_reduce_hook is not None:
                group.options.all_reduce_hook(total.shards)
            divide.scale(total.shards, division.after)
            is_copying = self._accumulator.add(total.params, *self._to_grad_dtypes(total))
            done = streams.record(stream)
        comm.note_reduced(stream, done, host_waits=is_copying)
        if stream is not comm.reduce_stream:
            comm.keep_reduce_output(total.shards, done)
        return done

    def _all_reduce_stream(self) -> Stream:
        """All-reduces use other links than reduce-scatters, so they have a stream of their own."""
        options, comm = self._group.options, self._group.comm
        if options.all_reduce_hook is not None and options.all_reduce_hook_stream is not None:
            return options.all_reduce_hook_stream
        if self._group.mesh.replicas is not None or options.all_reduce_hook is not None:
            return comm.all_reduce_stream
        return comm.reduce_stream

    def _with_partial(self, summed: Reduced | None) -> Reduced:
        """``summed`` and what earlier backwards left, added up, on the reduce stream."""
        partial, self._partial = self._partial, None
        if partial is None or summed is None:
            total = summed or partial
            assert total is not None
            return total
        if partial.params == summed.params and partial.layout.dtype == summed.layout.dtype:
            summed.shards.add_(partial.shards)
            if self._group.mesh.size == 1:
                # Once a reduction's input, so in the memory of the current stream, which must not take it yet.
                self._group.comm.keep_reduce_input(partial.shards, streams.record(self._group.comm.reduce_stream))
            return summed
        # Another set of parameters had gradients then.
        either = set(partial.params) | set(summed.params)
        params = tuple(param for param in self._group.shards.params if param in either)
        layout = self._layout(params, torch.promote_types(partial.layout.dtype, summed.layout.dtype))
        shards = torch.zeros(layout.numel, dtype=layout.dtype, device=self._group.device)
        views = dict(zip(params, shard_views(shards, layout.slots), strict=True))
        for part in (partial, summed):
            for param, slot in zip(part.params, part.layout.slots, strict=True):
                views[param].add_(shard_view(part.shards, slot))
        return Reduced(params, layout, shards)

    def _division(self, dtype: torch.dtype) -> divide.Division:
        options, mesh = self._group.options, self._group.mesh
        extra: dict[str, Any] = {}
        if options.divide_factor is not None:
            extra["factor"] = options.divide_factor
        if options.force_sum:
            extra["force_sum"] = True
        return divide.divide(dtype, mesh.size, mesh.replicate_size, **extra)

    def _to_grad_dtypes(self, total: Reduced) -> tuple[BufferLayout, torch.Tensor]:
        """The shards of ``total`` in the dtypes of the gradients, and their layout."""
        dtypes = [param.sharded.grad_dtype or total.layout.dtype for param in total.params]
        layout = self._layout(total.params, *dtypes)
        if layout.dtype != torch.uint8:
            return layout, total.shards.to(layout.dtype)
        shards = torch.zeros(layout.numel, dtype=layout.dtype, device=total.shards.device)
        views = shard_views(shards, layout.slots)
        foreach_copy_(views, shard_views(total.shards, total.layout.slots))
        return layout, shards

    def _layout(self, params: Sequence[ShardedParam], *dtypes: torch.dtype) -> BufferLayout:
        """The slots of shards of ``params`` in ``dtypes``, one for each or one for all."""
        # All parameters, as nearly always, need no list of their numbers.
        everyone = len(params) == len(self._group.shards.params)
        dtypes = dtypes[:1] if len(set(dtypes)) == 1 else dtypes
        key: tuple[Any, ...] = dtypes if everyone else (*dtypes, *(param.serial for param in params))
        if key not in self._layouts:
            if not everyone and len(self._layouts) >= _MAX_LAYOUTS:
                # Routers choose other experts in each step: as many subsets as there are steps.
                self._layouts.pop(next(iter(self._layouts)))
            mesh, sizes, dims = self._group.mesh, [p.size for p in params], [p.dim for p in params]
            each = dtypes * len(params) if len(dtypes) == 1 else dtypes
            self._layouts[key] = build_layout(sizes, each, mesh.size, mesh.rank, dims)
        return self._layouts[key]

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        group = self._group
        if group.options.reduce_scatter is not None:
            return group.options.reduce_scatter.allocate((numel,), dtype=dtype, device=group.device)
        return torch.empty(numel, dtype=dtype, device=group.device)


def _pack(
    params: Sequence[ShardedParam], grads: Sequence[torch.Tensor], layout: BufferLayout, contributions: torch.Tensor
) -> None:
    """Cut every gradient into padded chunks (padding zero) and lay them out rank-major in ``contributions``.

    ``contributions`` is 1-D, ``layout.world * layout.numel``, of the reduce dtype, which may differ from the
    gradients': the kernel casts.
    """
    # The kernel refuses empty tensors, which need no room either.
    filled = [
        grad if param.dim == 0 else _rows(grad, param.dim, layout.world)
        for param, grad in zip(params, grads, strict=True)
        if grad.numel()
    ]
    if not filled:
        return
    if len({grad.dtype for grad in filled}) > 1:
        # One parameter's gradient was accumulated in the reduce dtype, another's is new and of the dtype that autograd
        # computed it in.
        filled = [grad.to(layout.dtype) for grad in filled]
    chunk_cat(filled, 0, layout.world, out=contributions.view(layout.world, -1))


def _rows(grad: torch.Tensor, dim: int, world: int) -> torch.Tensor:
    """``grad`` with the chunks along ``dim``, not 0, one after the other along dimension 0."""
    return grad if world == 1 else torch.cat(torch.chunk(grad, world, dim=dim), dim=0)


# Sharded gradients


class GradBuffer(NamedTuple):
    """Where the sharded gradients that one reduction made lie, one for each of ``params``."""

    params: tuple[ShardedParam, ...]
    dtype: torch.dtype
    views: Views

    def current(self) -> torch.Tensor | None:
        """All of the memory, if these very tensors still are the gradients, so that adding to it adds to them."""
        grads = (param.sharded.grad for param in self.params)
        return self.views.whole(None if grad is None else dtensor.local_of(grad) for grad in grads)


class Accumulator:
    """Adds reduced shards to the gradients of one group, in their dtypes and where the parameters live."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._last: GradBuffer | None = None

    def add(self, params: Sequence[ShardedParam], layout: BufferLayout, shards: torch.Tensor) -> bool:
        """Add the views of ``shards`` to the gradients, or make them the gradients where there are none; run hooks.

        Runs on the current stream. A gradient that is made here lives in that stream's memory, or in that of ``shards``
        (see Note: reduction memory).

        ``shards`` is 1-D and of ``layout``: where each of ``params`` lies, in the dtype of its gradient.

        Returns:
            Whether a copy to the host may still be running, for which the host must wait before the gradients are used.
        """
        shards, is_copying = self._to_home(params, shards)
        last = self._last
        is_alike = last is not None and last.params == tuple(params) and last.dtype == layout.dtype
        # The bytes of several dtypes are no numbers to add.
        buffer = last.current() if last is not None and is_alike and layout.dtype != torch.uint8 else None
        if buffer is not None:
            buffer.add_(shards)
        else:
            self._add_views(params, layout, shards)
        for param in params:
            hooks.run_post_accumulate(param.sharded)
        return is_copying

    def _add_views(self, params: Sequence[ShardedParam], layout: BufferLayout, shards: torch.Tensor) -> None:
        views = shard_views(shards, layout.slots)
        existing: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        for param, view in zip(params, views, strict=True):
            if (grad := param.sharded.grad) is None:
                param.sharded.grad = dtensor.wrap(view, dtensor.with_dtype(param.spec, view.dtype))
            else:
                existing.append(dtensor.local_of(grad))
                added.append(view)
        if existing:
            foreach_add_(existing, added)
        self._last = GradBuffer(tuple(params), layout.dtype, remember(shards, views))

    def _to_home(self, params: Sequence[ShardedParam], shards: torch.Tensor) -> tuple[torch.Tensor, bool]:
        if not self._shards.offloads or shards.device.type == "cpu":
            return shards, False
        # Nothing on the host waits for a stream: what reads the copy before the end of backward must find it finished.
        is_read = any(param.sharded.grad is not None or hooks.post_accumulate_of(param.sharded) for param in params)
        may_overlap = self._shards.pins and not is_read
        home = torch.empty(shards.shape, dtype=shards.dtype, pin_memory=self._shards.pins)
        home.copy_(shards, non_blocking=may_overlap)
        return home, may_overlap
