"""From reduced shards to the gradients of sharded parameters."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fsdp_impl.common import dtensor, hooks
from fsdp_impl.common.layout import Layout, shard_view
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


class Accumulator:
    """Adds reduced shards to the gradients of one group, in the parameters' dtype and where the parameters live."""

    def __init__(self, *, offloads: bool, pins: bool) -> None:
        self._offloads = offloads
        self._pins = pins
        self._last: GradBuffer | None = None

    def add(self, params: Sequence[ShardedParam], layout: Layout, shards: torch.Tensor) -> bool:
        """Add the views of ``shards`` to the gradients, or make them the gradients where there are none; run hooks.

        Runs on the current stream. A gradient that is made here lives in that stream's memory or in that of ``shards``
        and is read on others (optimizer). When the user drops it, a later reduction may take its memory at once: that
        is safe, because the streams of reductions wait for the current stream of backward before each reduction, hence
        for whatever read the gradient.

        Args:
            params: what was reduced.
            layout: where each of ``params`` lies, in the parameters' dtype.
            shards: 1-D, of ``layout``.

        Returns:
            Whether a copy to the host may still be running, for which the host must wait before the gradients are used.
        """
        shards, is_copying = self._to_home(params, shards)
        last = self._last
        if last is not None and last.params == tuple(params) and last.is_current():
            last.buffer.add_(shards)
        else:
            self._add_views(params, layout, shards)
        for param in params:
            hooks.run_post_accumulate(param.sharded)
        return is_copying

    def _add_views(self, params: Sequence[ShardedParam], layout: Layout, shards: torch.Tensor) -> None:
        views = tuple(shard_view(shards, slot) for slot in layout.slots)
        held = [param.sharded.grad for param in params]
        existing = [(grad, view) for grad, view in zip(held, views, strict=True) if grad is not None]
        if existing:
            torch._foreach_add_([dtensor.local_of(grad) for grad, _ in existing], [view for _, view in existing])
        for param, grad, view in zip(params, held, views, strict=True):
            if grad is None:
                param.sharded.grad = dtensor.wrap(view, dtensor.with_dtype(param.spec, view.dtype))
        self._last = GradBuffer(shards, tuple(params), views)

    def _to_home(self, params: Sequence[ShardedParam], shards: torch.Tensor) -> tuple[torch.Tensor, bool]:
        if not self._offloads or shards.device.type == "cpu":
            return shards, False
        # Nothing on the host waits for a stream: what reads the copy before the end of backward must find it finished.
        is_read = any(param.sharded.grad is not None or hooks.post_accumulate_of(param.sharded) for param in params)
        may_overlap = self._pins and not is_read
        home = torch.empty(shards.shape, dtype=shards.dtype, pin_memory=self._pins)
        home.copy_(shards, non_blocking=may_overlap)
        return home, may_overlap
