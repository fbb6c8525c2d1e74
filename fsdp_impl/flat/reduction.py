"""Reduce a unit's gradient: reduce-scatter over the shards, all-reduce over the replicas."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function

from fsdp_impl.common import collectives, divide, hooks, streams
from fsdp_impl.common.streams import Event
from fsdp_impl.flat.gradients import Gradients
from fsdp_impl.flat.group import FlatGroup

CommHook = Callable[..., None]


class Reducer:
    """Reduces the gradients of one group.

    Attributes:
        comm_hook: the user's function in place of the collectives and the division, with its state; see
            ``FullyShardedDataParallel.register_comm_hook``.
    """

    def __init__(
        self,
        group: FlatGroup,
        gradients: Gradients,
        reduce_dtype: torch.dtype | None,
        *,
        keep_low_precision: bool,
    ) -> None:
        self._group = group
        self._gradients = gradients
        self._reduce_dtype = reduce_dtype
        self._keep_low_precision = keep_low_precision
        self.comm_hook: tuple[Any, CommHook] | None = None

    @torch.no_grad()
    def reduce(self, grad: torch.Tensor) -> None:
        """Average ``grad`` (1-D, ``layout.padded_numel``) over the ranks and add this rank's shard to the gradients.

        ``grad`` is memory of the current stream and is the caller's to give away: it may be written to.
        """
        group, context = self._group, self._group.context
        with record_function(f"FSDP::reduce ({group.label})"):
            context.release_reduce_inputs()
            context.release_reduce_outputs()
            contributions = grad.to(self._reduce_dtype or grad.dtype)
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
        """Whether a copy to the host may still be running, for which the host must wait."""
        flat = self._group.shards.flat
        dtype = shard.dtype if self._keep_low_precision else flat.dtype
        home = shard.to(dtype)
        params = [holder.param for holder in self._group.shards.holders()]
        may_overlap = False
        if home.device != flat.device:
            # Nothing on the host waits for a stream: what reads the copy before the end of backward must find it whole.
            may_overlap = not any(param.grad is not None or _acts_on_gradient(param) for param in params)
            pinned = torch.empty(home.size(), dtype=dtype, device=flat.device, pin_memory=True)
            home = pinned.copy_(home, non_blocking=may_overlap)
        self._gradients.add(home)
        for param in params:
            hooks.run_post_accumulate(param)
            _step_in_backward(param)
        return may_overlap

    def _division(self, dtype: torch.dtype) -> divide.Division:
        return divide.divide(dtype, self._group.ranks.size, self._group.ranks.replicate_size)


def _acts_on_gradient(param: torch.Tensor) -> bool:
    return bool(hooks.post_accumulate_of(param)) or hasattr(param, "_in_backward_optimizers")


def _step_in_backward(param: torch.Tensor) -> None:
    """Run the optimizers that ``torch.distributed.optim`` has attached to ``param``, and drop the gradient."""
    for optimizer in getattr(param, "_in_backward_optimizers", ()):
        if param.grad is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
