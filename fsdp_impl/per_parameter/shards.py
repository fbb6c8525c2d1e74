"""The one buffer in which the sharded parameters of a group live, and what happens when something moves them out.

The buffer is the input of the gather: while every parameter lies in its slot, a gather copies nothing in. Parameters
leave their slots when something replaces them (``.to()``, ``to_empty``, ``load_state_dict(assign=True)``, an optimizer
that swaps tensors). What left is never written back to the old slot: whoever swapped it out may still hold the old
tensor, and it must keep its values. When all have left they move into a new buffer together. While only some have, the
rest stays where a state dict made earlier still sees it, and gathers copy in.
"""

from collections.abc import Sequence

import torch
from torch import nn

from fsdp_impl.common.layout import Layout, build_layout, shard_rows, shard_view
from fsdp_impl.common.mesh import ShardMesh
from fsdp_impl.per_parameter.param import Owner, ShardedParam


class Shards:
    """The sharded parameters of one group.

    Attributes:
        params: the parameters, in the order of the slots of ``layout``.
        layout: their slots, by the dtypes they have now.
    """

    def __init__(self, originals: Sequence[nn.Parameter], owners: Sequence[list[Owner]], mesh: ShardMesh) -> None:
        self._mesh = mesh
        self.layout = self._layout([p.size() for p in originals], [p.dtype for p in originals])
        with torch.no_grad():
            self._buffer: torch.Tensor | None = self._new_buffer(originals[0].device)
            views = [shard_view(self._buffer, slot) for slot in self.layout.slots]
            for original, view in zip(originals, views, strict=True):
                start, rows = shard_rows(original.size(0), mesh.size, mesh.rank)
                view.copy_(original.narrow(0, start, rows))
        self.params = [
            ShardedParam(original, held_by, mesh, view)
            for original, held_by, view in zip(originals, owners, views, strict=True)
        ]

    @torch.no_grad()
    def refresh(self) -> bool:
        """Notice parameters that were moved or replaced; once all were, move them into a new buffer.

        Returns:
            Whether it wrote to a new buffer, on the current stream.
        """
        for param in self.params:
            param.adopt()
        left = sum(param.slot is None for param in self.params)
        if left == 0:
            return False
        layout = self._layout([param.size for param in self.params], [param.dtype for param in self.params])
        if layout != self.layout:
            self.layout = layout
        self._buffer = None
        if left < len(self.params) or len({param.local.device for param in self.params}) > 1:
            return False
        self._buffer = self._filled_buffer()
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            param.move_to(shard_view(self._buffer, slot))
        return True

    @torch.no_grad()
    def gather_input(self) -> torch.Tensor:
        """The buffer itself if all parameters lie in it, else a copy; 1-D, of ``layout.dtype``, padding zero."""
        return self._filled_buffer() if self._buffer is None else self._buffer

    def _layout(self, sizes: Sequence[torch.Size], dtypes: Sequence[torch.dtype]) -> Layout:
        return build_layout(sizes, dtypes, self._mesh.size, self._mesh.rank)

    def _new_buffer(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.layout.numel, dtype=self.layout.dtype, device=device)

    def _filled_buffer(self) -> torch.Tensor:
        buffer = self._new_buffer(self.params[0].local.device)
        views = [shard_view(buffer, slot) for slot in self.layout.slots]
        if not buffer.is_meta:
            torch._foreach_copy_(views, [param.local for param in self.params])
        return buffer
