"""Where the numbers of a group lie: the buffer of its shards, and the storage of its unsharded parameters.

A parameter of size ``(n, ...)`` over ``world`` ranks is cut into ``world`` chunks of ``ceil(n / world)`` rows, as
``torch.chunk`` cuts; the last chunks may be short or empty. In a buffer every chunk takes the space of a full one. The
rest is padding, always zero, so that collectives move equal pieces and no sum or norm sees garbage.

A parameter may be cut along another dimension, then evenly. Its chunk lies in the buffer as a contiguous tensor, which
in the whole parameter is ``blocks`` pieces with gaps between them.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from fsdp_impl.common.layout import chunk_rows, contiguous_stride, shard_rows


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the buffer of one rank.

    Attributes:
        offset: first element, in units of the layout's dtype.
        extent: elements with padding, in units of the layout's dtype; the same on every rank.
        size: the shape of this rank's shard, without padding.
        blocks: contiguous pieces of the whole parameter that a chunk consists of; 1 if cut along dimension 0.
    """

    offset: int
    extent: int
    dtype: torch.dtype
    size: torch.Size
    blocks: int = 1

    @cached_property
    def stride(self) -> tuple[int, ...]:
        return contiguous_stride(self.size)


@dataclass(frozen=True)
class BufferLayout:
    """The slots of a group of parameters, in the order of the parameters.

    Attributes:
        dtype: of the buffer: the parameters' dtype where they share one, else ``uint8``.
        numel: length of one rank's buffer, in elements of ``dtype``.
        order: indices of the slots by rising offset.
    """

    world: int
    dtype: torch.dtype
    numel: int
    slots: tuple[Slot, ...]
    order: tuple[int, ...]

    @cached_property
    def extents(self) -> list[int]:
        """Extents of the slots by rising offset; they add up to ``numel``."""
        offsets = [self.slots[index].offset for index in self.order]
        assert all(low <= high for low, high in pairwise(offsets)), offsets
        return [self.slots[index].extent for index in self.order]

    @cached_property
    def has_blocks(self) -> bool:
        """Whether the chunks of some parameter consist of several pieces."""
        return any(slot.blocks != 1 for slot in self.slots)


def shard_size(size: torch.Size, world: int, rank: int, dim: int = 0) -> torch.Size:
    """The shape of ``rank``'s shard of a parameter of ``size`` that is cut along ``dim``."""
    return torch.Size([*size[:dim], shard_rows(size[dim], world, rank)[1], *size[dim + 1 :]])


def build_layout(
    sizes: Sequence[torch.Size],
    dtypes: Sequence[torch.dtype],
    world: int,
    rank: int,
    dims: Sequence[int] | None = None,
) -> BufferLayout:
    """Lay out parameters of unsharded ``sizes``, cut along ``dims`` (default 0), without gaps.

    With several dtypes the unit is one byte and wider elements come first: every offset is then a multiple of its
    parameter's element size with no bytes lost to alignment.
    """
    unit = dtypes[0] if len(set(dtypes)) == 1 else torch.uint8
    order = sorted(range(len(sizes)), key=lambda index: -dtypes[index].itemsize)
    slots: list[Slot | None] = [None] * len(sizes)
    offset = 0
    for index in order:
        size, dim = sizes[index], dims[index] if dims else 0
        blocks = math.prod(size[:dim])
        chunk = blocks * chunk_rows(size[dim], world) * math.prod(size[dim + 1 :])
        extent = chunk * (dtypes[index].itemsize // unit.itemsize)
        # An empty parameter is one empty piece, however it is cut.
        slots[index] = Slot(offset, extent, dtypes[index], shard_size(size, world, rank, dim), max(blocks, 1))
        offset += extent
    return BufferLayout(world, unit, offset, tuple(slot for slot in slots if slot is not None), tuple(order))


def shard_view(buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The part of ``buffer`` (1-D, of the layout's dtype) that holds ``slot``'s shard, without its padding."""
    return shard_views(buffer, (slot,))[0]


def shard_views(buffer: torch.Tensor, slots: Sequence[Slot]) -> list[torch.Tensor]:
    """:func:`shard_view` of each of ``slots``."""
    # From where the buffer begins: what user code allocates may lie in the midst of a block.
    dtype, start = buffer.dtype, int(buffer.storage_offset())
    return [
        torch.as_strided(buffer, slot.size, slot.stride, start + slot.offset)
        if slot.dtype == dtype
        else buffer[slot.offset : slot.offset + slot.extent].view(slot.dtype)[: math.prod(slot.size)].view(slot.size)
        for slot in slots
    ]


def copy_out(rows: torch.Tensor, layout: BufferLayout, targets: list[torch.Tensor]) -> None:
    """Copy ``rows`` (``(world, numel)``, one rank's buffer each) into ``targets``, one for each slot by rising offset.

    A target is ``(world, extent)``, or ``(world, blocks, extent / blocks)`` for a slot of several blocks.
    """
    if not layout.has_blocks:
        torch.split_with_sizes_copy(rows, layout.extents, dim=1, out=targets)
        return
    pieces = rows.split(layout.extents, dim=1)
    for target, piece in zip(targets, pieces, strict=True):
        target.copy_(piece.unflatten(1, target.shape[1:]) if target.ndim == 3 else piece)


# What the CUDA caching allocator aligns a block to. With it, kernels that choose by alignment (cuBLAS, vectorised
# loads) choose for an unsharded parameter as they would for a plain one.
_ALIGNMENT = 512


# Note: unsharded parameters
#
# An unsharded parameter, its tensor and its storage are made once and stay; only the bytes of the storage come with
# each unshard and go with each reshard. Autograd saves the tensor, or views of it, between forward and backward, and
# finds the new bytes through it; and gradients are added up on the one leaf. The copy-out writes through other tensors
# on the same storage, so that autograd does not take it for a change of what it saved.


class UnshardedBuffer:
    """The memory of a group's unsharded parameters.

    All of them share one storage, whose bytes are allocated at unshard and freed at reshard (see Note: unsharded
    parameters), with room for ``world`` padded chunks of each slot; those in ``apart``, by the indices of their slots,
    have storages of their own, which their tensors begin.
    """

    def __init__(
        self, sizes: Sequence[torch.Size], layout: BufferLayout, device: torch.device, *, apart: Collection[int] = ()
    ) -> None:
        self._device = device
        # Of each slot: the storage, by its index, and where the slot begins there.
        self._places: list[tuple[int, int]] = []
        self._nbytes = [0]
        for index, slot in enumerate(layout.slots):
            nbytes = _round_up(slot.extent * layout.dtype.itemsize * layout.world)
            if index in apart:
                self._places.append((len(self._nbytes), 0))
                self._nbytes.append(nbytes)
            else:
                self._places.append((0, self._nbytes[0]))
                self._nbytes[0] += nbytes
        # Normal tensors even if the first unshard happens under inference mode: training may follow.
        with torch.inference_mode(False), torch.no_grad():
            self._storages = [
                torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage() for nbytes in self._nbytes
            ]
            self.tensors = [
                self._tensor(place, size, slot.dtype)
                for place, size, slot in zip(self._places, sizes, layout.slots, strict=True)
            ]
        self._targets: dict[int, list[torch.Tensor]] = {}

    def allocate(self) -> None:
        """Give the storages their bytes, in the memory of the current stream; their content is undefined."""
        for storage, nbytes in zip(self._storages, self._nbytes, strict=True):
            if storage.size() != nbytes:
                storage.resize_(nbytes)

    def free(self) -> None:
        """Give the bytes back; the tensors stay, without data."""
        for storage in self._storages:
            storage.resize_(0)

    def targets(self, layout: BufferLayout) -> list[torch.Tensor]:
        """Tensors of ``layout.dtype``, by rising offset, that :func:`copy_out` copies a gathered buffer into.

        They have version counters of their own (see Note: unsharded parameters). ``layout.world`` must divide the world
        of the layout that the buffer was made with: then the padded chunks fit.
        """
        if layout.world not in self._targets:
            with torch.inference_mode(False), torch.no_grad():
                self._targets[layout.world] = [self._target(index, layout) for index in layout.order]
        return self._targets[layout.world]

    def _target(self, index: int, layout: BufferLayout) -> torch.Tensor:
        slot = layout.slots[index]
        if slot.blocks == 1:
            return self._tensor(self._places[index], torch.Size([layout.world, slot.extent]), layout.dtype)
        size = torch.Size([slot.blocks, layout.world, slot.extent // slot.blocks])
        return self._tensor(self._places[index], size, layout.dtype).transpose(0, 1)

    def _tensor(self, place: tuple[int, int], size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        index, start = place
        empty = torch.empty(0, dtype=dtype, device=self._device)
        return empty.set_(self._storages[index], start // dtype.itemsize, size, contiguous_stride(size))


def _round_up(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
