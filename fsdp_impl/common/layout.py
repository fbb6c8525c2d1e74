"""Where each parameter's shard lies in a buffer: pure arithmetic, no communication.

A parameter of size ``(n, ...)`` over ``world`` ranks is cut into ``world`` chunks of ``ceil(n / world)`` rows, as
``torch.chunk`` cuts; the last chunks may be short or empty. In a buffer every chunk takes the space of a full one. The
rest is padding, always zero, so that collectives move equal pieces and no sum or norm sees garbage.

A parameter may be cut along another dimension, then evenly. Its chunk lies in the buffer as a contiguous tensor, which
in the whole parameter is ``blocks`` pieces with gaps between them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the buffer of one rank.

    Attributes:
        offset: first element, in units of the layout's dtype.
        extent: elements with padding, in units of the layout's dtype; the same on every rank.
        dtype: the parameter's dtype.
        size: the shape of this rank's shard, without padding.
        blocks: contiguous pieces of the whole parameter that a chunk consists of; 1 if cut along dimension 0.
    """

    offset: int
    extent: int
    dtype: torch.dtype
    size: torch.Size
    blocks: int = 1

    @property
    def stride(self) -> tuple[int, ...]:
        return contiguous_stride(self.size)


@dataclass(frozen=True)
class Layout:
    """The slots of a group of parameters, in the order of the parameters.

    Attributes:
        world: number of ranks sharded over.
        dtype: dtype of the buffer: the parameters' dtype where they share one, else ``uint8``.
        numel: length of one rank's buffer, in elements of ``dtype``.
        order: indices of the slots by rising offset.
    """

    world: int
    dtype: torch.dtype
    numel: int
    slots: tuple[Slot, ...]
    order: tuple[int, ...]


def chunk_rows(rows: int, world: int) -> int:
    """Rows of a full chunk: ``ceil(rows / world)``."""
    return -(-rows // world)


def shard_rows(rows: int, world: int, rank: int) -> tuple[int, int]:
    """First row and number of rows of ``rank``'s chunk; an empty chunk starts at ``rows``."""
    chunk = chunk_rows(rows, world)
    start = min(rank * chunk, rows)
    return start, min(chunk, rows - start)


def contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of ``size``; dimensions of length 0 count as 1, as in torch."""
    stride = [1] * len(size)
    for dim in range(len(size) - 1, 0, -1):
        stride[dim - 1] = stride[dim] * max(size[dim], 1)
    return tuple(stride)


def shard_size(size: torch.Size, world: int, rank: int, dim: int = 0) -> torch.Size:
    """The shape of ``rank``'s shard of a parameter of ``size`` that is cut along ``dim``."""
    return torch.Size([*size[:dim], shard_rows(size[dim], world, rank)[1], *size[dim + 1 :]])


def build_layout(
    sizes: Sequence[torch.Size],
    dtypes: Sequence[torch.dtype],
    world: int,
    rank: int,
    dims: Sequence[int] | None = None,
) -> Layout:
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
        slots[index] = Slot(offset, extent, dtypes[index], shard_size(size, world, rank, dim), blocks)
        offset += extent
    return Layout(world, unit, offset, tuple(slot for slot in slots if slot is not None), tuple(order))


def shard_view(buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The part of ``buffer`` (1-D, of the layout's dtype) that holds ``slot``'s shard, without its padding."""
    if buffer.dtype == slot.dtype:
        return torch.as_strided(buffer, slot.size, slot.stride, slot.offset)
    piece = buffer[slot.offset : slot.offset + slot.extent].view(slot.dtype)
    return piece[: math.prod(slot.size)].view(slot.size)


def copy_out(rows: torch.Tensor, layout: Layout, targets: Sequence[torch.Tensor]) -> None:
    """Copy ``rows`` (``(world, numel)``, one rank's buffer each) into ``targets``, one for each slot by rising offset.

    A target is ``(world, extent)``, or ``(world, blocks, extent / blocks)`` for a slot of several blocks.
    """
    if all(target.ndim == 2 for target in targets):
        torch.split_with_sizes_copy(rows, split_sizes(layout), dim=1, out=list(targets))
        return
    pieces = rows.split(split_sizes(layout), dim=1)
    for target, piece in zip(targets, pieces, strict=True):
        target.copy_(piece.unflatten(1, target.shape[1:]) if target.ndim == 3 else piece)


def split_sizes(layout: Layout) -> list[int]:
    """Extents of the slots by rising offset; they add up to ``layout.numel``."""
    offsets = [layout.slots[index].offset for index in layout.order]
    assert all(low <= high for low, high in pairwise(offsets)), offsets
    return [layout.slots[index].extent for index in layout.order]
