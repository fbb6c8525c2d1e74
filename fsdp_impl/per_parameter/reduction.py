"""From unsharded gradients to sharded ones: reduce and accumulate."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.profiler import record_function

from fsdp_impl.common import collectives, divide, dtensor, streams
from fsdp_impl.common.layout import Layout, build_layout, shard_view
from fsdp_impl.per_parameter.group import ParamGroup
from fsdp_impl.per_parameter.param import ShardedParam


class GradBuffer(NamedTuple):
    """The sharded gradients that one reduction made: ``locals`` are views of ``buffer``, one for each of ``params``."""

    buffer: torch.Tensor
    params: tuple[ShardedParam, ...]
    locals: tuple[torch.Tensor, ...]

    def is_current(self) -> bool:
        """Whether these very tensors still are the gradients, so that adding to the buffer adds to them."""
        return all(
            param.sharded.grad is not None and dtensor.local_of(param.sharded.grad) is local
            for param, local in zip(self.params, self.locals, strict=True)
        )


def take_unsharded_grads(group: ParamGroup) -> tuple[list[ShardedParam], list[torch.Tensor]]:
    """Take the gradients that autograd left on unsharded parameters, and the parameters that have one."""
    params: list[ShardedParam] = []
    grads: list[torch.Tensor] = []
    for param in group.shards.params:
        if param.unsharded is not None and param.unsharded.grad is not None:
            params.append(param)
            grads.append(param.unsharded.grad)
            param.unsharded.grad = None
    return params, grads


class Reducer:
    """Reduces the gradients of one group."""

    def __init__(self, group: ParamGroup) -> None:
        self._group = group
        self._last: GradBuffer | None = None

    @torch.no_grad()
    def reduce(self, params: Sequence[ShardedParam], grads: list[torch.Tensor]) -> None:
        """Average ``grads`` (unsharded sizes) over the ranks and add each shard to ``param.sharded.grad``.

        Empties ``grads``, to free them as soon as they are copied in.

        Raises:
            ValueError: if the gradients differ in dtype.
        """
        group, comm = self._group, self._group.comm
        dtype = _common_dtype(params, grads)
        layout = build_layout([param.size for param in params], [dtype] * len(params), group.mesh.size, group.mesh.rank)
        current = streams.current(group.device)
        with record_function(f"FSDP::reduce ({group.label})"):
            comm.release_reduce_inputs()
            # In the memory of the current stream, on which autograd made the gradients that are copied in.
            contributions = _copy_in(grads, layout)
            grads.clear()
            streams.join(comm.reduce_stream, current)
            with streams.use(comm.reduce_stream):
                output = self._reduce_scatter(contributions, layout)
                reduced = streams.record(comm.reduce_stream)
                self._accumulate(params, layout, output)
                comm.reduced_event = streams.record(comm.reduce_stream)
            # At shard size 1 the input is the output and is read until it has been accumulated.
            comm.keep_reduce_input(contributions, comm.reduced_event if output is contributions else reduced)

    def _reduce_scatter(self, contributions: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The averaged shards: 1-D of ``layout``, in the memory of the reduce stream."""
        group = self._group
        division = divide.divide(layout.dtype, group.mesh.size)
        divide.scale(contributions, division.before)
        output = contributions
        if group.mesh.size > 1:
            output = torch.empty(layout.numel, dtype=layout.dtype, device=group.device)
            collectives.reduce(output, contributions, group.mesh.group, division.reduce_op, unit=group.label)
        divide.scale(output, division.after)
        return output

    def _accumulate(self, params: Sequence[ShardedParam], layout: Layout, output: torch.Tensor) -> None:
        """Add the views of ``output`` to the sharded gradients, or make them the gradients where there are none.

        A gradient that is made here lives in the memory of the reduce stream and is read on others (optimizer). When
        the user drops it, its memory may be taken by a later reduction at once: that is safe, because the reduce stream
        waits for the current stream before each reduction, hence for whatever read the gradient.
        """
        last = self._last
        if last is not None and last.params == tuple(params) and last.is_current():
            last.buffer.add_(output)
        else:
            views = tuple(shard_view(output, slot) for slot in layout.slots)
            held = [param.sharded.grad for param in params]
            if any(grad is not None for grad in held):
                existing = [(grad, view) for grad, view in zip(held, views, strict=True) if grad is not None]
                torch._foreach_add_([dtensor.local_of(grad) for grad, _ in existing], [view for _, view in existing])
            for param, grad, view in zip(params, held, views, strict=True):
                if grad is None:
                    param.sharded.grad = dtensor.wrap(view, param.spec)
            self._last = GradBuffer(output, tuple(params), views)
        for param in params:
            _run_post_accumulate_hooks(param)


def _common_dtype(params: Sequence[ShardedParam], grads: Sequence[torch.Tensor]) -> torch.dtype:
    dtypes = {grad.dtype for grad in grads}
    if len(dtypes) > 1:
        found = {param.fqn: grad.dtype for param, grad in zip(params, grads, strict=True)}
        raise ValueError(f"FSDP reduces the gradients of a group together and expects one dtype, but got {found}")
    return dtypes.pop()


def _copy_in(grads: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Cut every gradient into padded chunks (padding zero) and lay them out rank-major: 1-D, ``world * numel``."""
    contributions = torch.empty(layout.world * layout.numel, dtype=layout.dtype, device=grads[0].device)
    # The kernel refuses empty tensors, which need no room either.
    filled = [grad for grad in grads if grad.numel() > 0]
    if filled:
        torch._chunk_cat(filled, 0, layout.world, out=contributions.view(layout.world, -1))
    return contributions


def _run_post_accumulate_hooks(param: ShardedParam) -> None:
    """Autograd accumulates into unsharded parameters; users hook the sharded ones, whose gradient is there now."""
    hooks = getattr(param.sharded, "_post_accumulate_grad_hooks", None) or {}
    for hook in tuple(hooks.values()):
        hook(param.sharded)
