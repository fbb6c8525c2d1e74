"""The memory of a group's unsharded parameters.

All of them share one storage, whose bytes are allocated at unshard and freed at reshard. The tensors on it are made
once and stay: autograd saves them, or views of them, for backward, and finds the new bytes through them after the
next unshard.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from fsdp_impl.common.layout import Layout, contiguous_stride

# What the CUDA caching allocator aligns a block to. With it, kernels that choose by alignment (cuBLAS, vectorised
# loads) choose for an unsharded parameter as they would for a plain one.
_ALIGNMENT = 512


class UnshardedBuffer:
    """Storage for parameters of ``sizes`` and ``dtypes``, each with room for ``world`` padded chunks of ``layout``.

    Args:
        sizes: unsharded sizes of the parameters.
        layout: the layout they are sharded with.
        device: where they are computed with.
    """

    def __init__(self, sizes: Sequence[torch.Size], layout: Layout, device: torch.device) -> None:
        self._starts: list[int] = []
        nbytes = 0
        for slot in layout.slots:
            self._starts.append(nbytes)
            nbytes += _round_up(slot.extent * layout.dtype.itemsize * layout.world)
        self._nbytes = nbytes
        self._device = device
        # Normal tensors even if the first unshard happens under inference mode: training may follow.
        with torch.inference_mode(False), torch.no_grad():
            self._storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
            self.tensors = [
                self._tensor(start, size, slot.dtype)
                for start, size, slot in zip(self._starts, sizes, layout.slots, strict=True)
            ]
        self._targets: dict[int, list[torch.Tensor]] = {}

    def allocate(self) -> None:
        """Give the storage its bytes, in the memory of the current stream; their content is undefined."""
        if self._storage.size() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Give the bytes back; the tensors stay, without data."""
        if self._storage.size() != 0:
            self._storage.resize_(0)

    def targets(self, layout: Layout) -> list[torch.Tensor]:
        """Tensors of ``layout.dtype``, by rising offset, that :func:`layout.copy_out` copies a gathered buffer into.

        They are objects of their own on the same storage, with their own version counters: a copy into them does not
        look to autograd like a change of the parameters that it saved. ``layout.world`` must divide the world of the
        layout that the buffer was made with: then the padded chunks fit.
        """
        if layout.world not in self._targets:
            with torch.inference_mode(False), torch.no_grad():
                self._targets[layout.world] = [self._target(index, layout) for index in layout.order]
        return self._targets[layout.world]

    def _target(self, index: int, layout: Layout) -> torch.Tensor:
        slot = layout.slots[index]
        if slot.blocks == 1:
            return self._tensor(self._starts[index], torch.Size([layout.world, slot.extent]), layout.dtype)
        size = torch.Size([slot.blocks, layout.world, slot.extent // slot.blocks])
        return self._tensor(self._starts[index], size, layout.dtype).transpose(0, 1)

    def _tensor(self, start: int, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        empty = torch.empty(0, dtype=dtype, device=self._device)
        return empty.set_(self._storage, start // dtype.itemsize, size, contiguous_stride(size))


class Freeable(Protocol):
    """Memory of unsharded parameters."""

    def free(self) -> None:
        """Give the bytes back as soon as nothing reads them."""
        ...


def reshard(buffer: Freeable, *, unit: str) -> None:
    """Free the unsharded parameters of ``unit``; the caller has registered the sharded ones already."""
    buffer.free()


def _round_up(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
