"""Digests of the blocks of rows of a full tensor, which add over the parts that ranks or files hold of them.

A full tensor is divided along its first dimension into at most :data:`MOST` blocks of equally many rows. A block has a
hash and the sum of its squares. The hash is a sum over the block's elements, modulo 2^64, of the bits of an element
times a number that depends on its position in the block alone. The hash of a block is therefore the sum of those of its
parts, exactly, whatever cuts it, and equal blocks have equal hashes wherever they stand. A tensor also has the sketch
of ``tensors.fingerprints``, by which distances are known between tensors that are not equal.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from shardproof.harness.tensors.fingerprints import Box, K, digests, host_rows, strided, words_of
from shardproof.harness.tensors.pieces import Spans

MOST = 64
"""The most blocks of a tensor."""

#: Elements whose positions are made at a time: int64, in some four copies.
_CHUNK = 1 << 20

_MASK = (1 << 64) - 1


@dataclasses.dataclass
class BlockSums:
    """Sums over the elements of one block of a tensor, or over a part of them.

    Attributes:
        hash: of its elements at their positions in the block, modulo 2^64.
        squares: the sum of their squares.
        numel: their number.
    """

    hash: int = 0
    squares: float = 0.0
    numel: int = 0

    def add(self, other: "BlockSums") -> None:
        """Add what another part of the tensor has of the block."""
        self.hash = (self.hash + other.hash) & _MASK
        self.squares += other.squares
        self.numel += other.numel


class Sums(NamedTuple):
    """The digest of a part of a tensor: its blocks by number, and the sketch of the part in the full tensor.

    Attributes:
        digits: of float32, 1 if an element has more digits than bfloat16 has, and 2 if one has more than float16 has;
            added. 0 if all elements are zero in these digits, and of other dtypes.
    """

    blocks: dict[int, BlockSums]
    sketch: tuple[float, ...]
    digits: int = 0

    @property
    def squares(self) -> float:
        """The sum of the squares of all elements."""
        return sum(one.squares for one in self.blocks.values())


def rows_of_block(shape: Sequence[int]) -> int:
    """Return how many rows a block of a full tensor has, except perhaps the last one; 1 without dimensions."""
    return max(1, -(-shape[0] // MOST)) if shape else 1


def count_of(shape: Sequence[int]) -> int:
    """Return the number of blocks of a full tensor."""
    if not math.prod(shape):
        return 0
    return -(-shape[0] // rows_of_block(shape)) if shape else 1


def numel_of(number: int, shape: Sequence[int]) -> int:
    """Return how many elements a block of a full tensor has."""
    if not shape:
        return 1
    rows = rows_of_block(shape)
    return max(0, min(rows, shape[0] - number * rows)) * math.prod(shape[1:])


@torch.no_grad()
def sums(tensors: Sequence[torch.Tensor], boxes: Sequence[Box]) -> list[Sums]:
    """Return the sums of parts of tensors; they are copied to the host together, once.

    Args:
        tensors: plain, of any dtype and device; the elements of the boxes in their order.
        boxes: which elements of the full tensors they are.
    """
    parts = [strided(tensor.detach()) for tensor in tensors]
    places: list[list[tuple[int, int]]] = []  # the blocks of each tensor, with the numbers of elements
    numbers: list[torch.Tensor] = []
    for tensor, box in zip(parts, boxes, strict=True):
        mine = []
        for block, part, positions in _parts(tensor, box):
            mine.append((block, part.numel()))
            numbers.append(torch.stack([_hash(part, positions), _squares(part).view(torch.int64), _digits(part)]))
        places.append(mine)
    rows = iter(host_rows(numbers))
    sketches = [one.numbers[:K] for one in digests([_countable(one) for one in parts], boxes)]
    found = []
    for mine, sketch in zip(places, host_rows(sketches), strict=True):
        blocks: dict[int, BlockSums] = {}
        digits = 0
        for block, numel in mine:
            hashed, squares, more = next(rows)
            digits |= int(more)
            value = torch.tensor(squares).view(torch.float64).item()
            blocks.setdefault(block, BlockSums()).add(BlockSums(int(hashed) & _MASK, value, numel))
        found.append(Sums(blocks, tuple(sketch), digits))
    return found


def _countable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which sketches can be made: booleans as numbers."""
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor


class Positions(NamedTuple):
    """The flat positions in a block of a part's elements: those of a box, row by row, or of a range."""

    shape: tuple[int, ...]  # of the full block
    dims: tuple[Spans, ...] | None  # None: a range
    start: int  # of a range


def _parts(tensor: torch.Tensor, box: Box) -> Iterator[tuple[int, torch.Tensor, Positions]]:
    """Yield what a part has of each block, flattened to rows, with its positions there."""
    shape = box.shape
    if not tensor.numel():
        return
    rows, inner = rows_of_block(shape), math.prod(shape[1:])
    if not shape:
        yield 0, tensor.reshape(1, 1), Positions((), None, 0)
        return
    if box.flat is not None:
        start, stop = box.flat
        flat = tensor.reshape(-1)
        for block in range(start // (rows * inner), -(-stop // (rows * inner))):
            first, last = block * rows * inner, min((block + 1) * rows * inner, shape[0] * inner)
            one, other = max(start, first), min(stop, last)
            if one < other:
                size = (min(rows, shape[0] - block * rows), *shape[1:])
                yield block, flat[one - start : other - start][None], Positions(size, None, one - first)
        return
    dims = box.dims or tuple(((0, size),) for size in shape)
    held = tensor.reshape(box.held_shape[0], -1)
    done = 0
    for start, stop in dims[0]:
        for block in range(start // rows, -(-stop // rows)):
            one, other = max(start, block * rows), min(stop, (block + 1) * rows)
            size = (min(rows, shape[0] - block * rows), *shape[1:])
            part = held[done + one - start : done + other - start]
            yield block, part, Positions(size, (((one - block * rows, other - block * rows),), *dims[1:]), 0)
        done += stop - start


def _hash(part: torch.Tensor, positions: Positions) -> torch.Tensor:
    """Return the hash of a part of a block, int64 []: the sum of the words times the numbers of their positions."""
    words = words_of(part.contiguous())
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    height, width = part.shape[0], part.numel() // max(1, part.shape[0])
    words = words.reshape(height, width, -1)
    columns = _columns(positions, width, part.device)
    step = max(1, _CHUNK // max(1, width))
    for first in range(0, height, step):
        some = words[first : first + step]
        if positions.dims is None:
            for begin in range(0, width, _CHUNK):  # one row, a range
                chosen = some[:, begin : begin + _CHUNK]
                where = torch.arange(begin, begin + chosen.shape[1], device=part.device) + positions.start
                total = total + _weighted(chosen, where[None])
        else:
            base = torch.arange(first, first + len(some), device=part.device) + positions.dims[0][0][0]
            total = total + _weighted(some, base[:, None] * math.prod(positions.shape[1:]) + columns)
    return total


def _weighted(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the sum of words [rows, columns, words of an element] times the numbers of places [rows, columns]."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number in range(words.shape[2]):
        mixed = (places * words.shape[2] + number + 1) * 0x1E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
        # Odd, so that no bit of an element is lost at the top.
        total = total + ((words[:, :, number].to(torch.int64) + 0x2545F491) * ((mixed ^ (mixed >> 32)) | 1)).sum()
    return total


def _columns(positions: Positions, width: int, device: torch.device) -> torch.Tensor:
    """Return the positions within a row of the elements of a part's rows, int64 [width]."""
    if positions.dims is None:
        return torch.arange(width, device=device)
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for spans, size in zip(positions.dims[1:], positions.shape[1:], strict=True):
        mine = [torch.arange(start, stop, device=device) for start, stop in spans]
        held = torch.cat(mine) if mine else torch.zeros(0, dtype=torch.int64, device=device)
        found = (found[:, None] * size + held).flatten()
    return found


def _squares(part: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares, float64 []."""
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
    flat = part.reshape(-1)
    found = torch.zeros((), dtype=torch.float64, device=part.device)
    for some in flat.split(_CHUNK):
        found = found + some.to(torch.float64).square().sum()
    return found


def _digits(part: torch.Tensor) -> torch.Tensor:
    """Return which digits elements have, as ``Sums.digits``, int64 []."""
    if part.dtype != torch.float32:
        return torch.zeros((), dtype=torch.int64, device=part.device)
    words = part.contiguous().view(torch.int32)
    more = [(words & mask).ne(0).any().to(torch.int64) for mask in (0xFFFF, 0x1FFF)]
    return more[0] + 2 * more[1]


def total(parts: Iterable[Sums]) -> Sums:
    """Add the sums of parts that do not overlap."""
    blocks: dict[int, BlockSums] = {}
    sketch = [0.0] * K
    digits = 0
    for part in parts:
        digits |= part.digits
        for number, block in part.blocks.items():
            blocks.setdefault(number, BlockSums()).add(block)
        sketch = [one + other for one, other in zip(sketch, part.sketch, strict=True)]
    return Sums(blocks, tuple(sketch), digits)
