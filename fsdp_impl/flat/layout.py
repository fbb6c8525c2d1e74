"""Where each parameter lies in a flat parameter, and which part of it each rank holds: pure arithmetic.

The parameters of a unit are flattened and laid one after the other. Where the original parameters stay visible, each
begins at a multiple of 16 bytes, so that kernels find it aligned. The whole is cut into as many equal shards as there
are ranks, wherever the cuts fall; the end is padded to make them equal. Padding is zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch

from fsdp_impl.common.layout import contiguous_stride

# The alignment of vectorised loads.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Piece:
    """One parameter's place in the flat parameter."""

    offset: int
    size: torch.Size
    stride: tuple[int, ...]  # not always contiguous, but dense

    @cached_property
    def numel(self) -> int:
        return math.prod(self.size)

    @cached_property
    def is_contiguous(self) -> bool:
        return self.stride == contiguous_stride(self.size)


@dataclass(frozen=True)
class Span:
    """The part of one parameter that lies in one shard; empty spans have ``numel`` 0."""

    start: int  # counted from the parameter's own beginning
    numel: int
    offset: int  # counted from the beginning of the shard


@dataclass(frozen=True)
class FlatLayout:
    """The places of a unit's parameters in its flat parameter, in their order, and into how many shards it is cut."""

    pieces: tuple[Piece, ...]
    numel: int  # up to the end of the last parameter, without padding
    world: int

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.world)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world

    def span(self, index: int, rank: int) -> Span:
        """What of parameter ``index`` lies in the shard of ``rank``."""
        piece = self.pieces[index]
        begin, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
        first, last = max(piece.offset, begin), min(piece.offset + piece.numel, end)
        if first >= last:
            return Span(0, 0, 0)
        return Span(first - piece.offset, last - first, first - begin)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in ``flat`` (1-D, ``padded_numel``), as views of it in their shapes; differentiable."""
        sizes, places = self._split_sizes
        parts = flat.split(sizes)
        return [shaped(parts[place], piece) for place, piece in zip(places, self.pieces, strict=True)]

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """:meth:`split` with one node of autograd, where there would be one for each parameter, and one more.

        Only where :attr:`is_contiguous`.
        """
        made: tuple[torch.Tensor, ...] = cast(Any, _Parts).apply(flat, self)
        return list(made)

    def join(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The reverse of :meth:`split` where :attr:`is_contiguous`, zero where parts are missing; ``None`` of none."""
        first = next((part for part in parts if part is not None), None)
        if first is None:
            return None
        sizes, places = self._split_sizes
        pieces = dict(zip(places, parts, strict=True))
        flat = [
            first.new_zeros(n) if (part := pieces.get(i)) is None else part.reshape(-1) for i, n in enumerate(sizes)
        ]
        return torch.cat(flat)

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether all parameters are, in their shapes."""
        return all(piece.is_contiguous for piece in self.pieces)

    @cached_property
    def _split_sizes(self) -> tuple[list[int], list[int]]:
        """Sizes that cut the flat parameter into parameters and padding, and which of them are parameters."""
        sizes: list[int] = []
        places: list[int] = []
        end = 0
        for piece in self.pieces:
            if piece.offset > end:
                sizes.append(piece.offset - end)
            places.append(len(sizes))
            sizes.append(piece.numel)
            end = piece.offset + piece.numel
        if self.padded_numel > end:
            sizes.append(self.padded_numel - end)
        return sizes, places


class _Parts(torch.autograd.Function):
    """See :meth:`FlatLayout.parts`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(flat: torch.Tensor, layout: FlatLayout) -> tuple[torch.Tensor, ...]:
        return tuple(layout.split(flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, FlatLayout], output: Any) -> None:
        ctx.layout = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return ctx.layout.join(grads), None


def build_flat_layout(
    sizes: Sequence[torch.Size], strides: Sequence[tuple[int, ...]], world: int, *, alignment: int = 1
) -> FlatLayout:
    """Lay out parameters of ``sizes``, each at a multiple of ``alignment`` elements."""
    pieces: list[Piece] = []
    end = 0
    for size, stride in zip(sizes, strides, strict=True):
        offset = -(-end // alignment) * alignment
        pieces.append(Piece(offset, size, stride))
        end = offset + math.prod(size)
    return FlatLayout(tuple(pieces), end, world)


def alignment_of(dtype: torch.dtype) -> int:
    """Elements of ``dtype`` in 16 bytes."""
    return max(1, _ALIGNMENT_BYTES // dtype.itemsize)


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as 1-D in the order of its memory, without a copy if it is dense."""
    if tensor.is_contiguous():
        return tensor.reshape(-1)
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().reshape(-1)


def stride_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that fit what :func:`flattened` makes of ``tensor``."""
    if is_dense(tensor):
        return tuple(tensor.stride())
    return contiguous_stride(tensor.size())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a block of memory, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def shaped(part: torch.Tensor, piece: Piece) -> torch.Tensor:
    """``part`` (1-D, in the order of memory) as a view in the shape of the parameter; differentiable."""
    return (
        part.view(piece.size)
        if piece.is_contiguous
        else part.as_strided(piece.size, piece.stride, part.storage_offset())
    )
