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
    places: list[dict[int, int]] = []  # the numbers of elements of the blocks of each tensor
    tables: list[torch.Tensor] = []
    for tensor, box in zip(parts, boxes, strict=True):
        numels, table = _table(tensor, box)
        places.append(numels)
        tables.append(table)
    sketches = [one.numbers[:K] for one in digests([_countable(one) for one in parts], boxes)]
    found = []
    for numels, (hashes, bits, digits), sketch in zip(places, host_rows(tables), host_rows(sketches), strict=True):
        squares = torch.tensor(bits).view(torch.float64).tolist()
        mine = {block: BlockSums(hashes[block] & _MASK, squares[block], numel) for block, numel in numels.items()}
        found.append(Sums(mine, tuple(sketch), digits[0]))
    return found


def _table(tensor: torch.Tensor, box: Box) -> tuple[dict[int, int], torch.Tensor]:
    """Return how many elements of each block a part has; and hashes, squares and digits, int64 [3, MOST]."""
    hashes = torch.zeros(MOST, dtype=torch.int64, device=tensor.device)
    squares = torch.zeros(MOST, dtype=torch.float64, device=tensor.device)
    numels: dict[int, int] = {}
    for part, rows in _parts(tensor, box):
        _add(part, rows, hashes, squares)
        width = part.numel() // max(1, part.shape[0])
        for block, count in enumerate(torch.bincount(rows.held, minlength=1).tolist()):
            if count:
                numels[block] = numels.get(block, 0) + count * width
    return numels, torch.stack([hashes, squares.view(torch.int64), _digits(tensor).expand(MOST)])


def _countable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which sketches can be made: booleans as numbers."""
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor


class Rows(NamedTuple):
    """The rows of a part: the block of each, int64, and the position of its first element in the block's elements.

    Attributes:
        held: the block of each, on the host.
        columns: the positions of a row's elements from there.
    """

    held: torch.Tensor
    blocks: torch.Tensor
    begins: torch.Tensor
    columns: torch.Tensor


def _parts(tensor: torch.Tensor, box: Box) -> Iterator[tuple[torch.Tensor, Rows]]:
    """Yield a part as rows [rows, columns], with their positions; a range may begin and end within a row."""
    shape = box.shape
    if not tensor.numel():
        return
    if not shape:
        one = torch.zeros(1, dtype=torch.int64, device=tensor.device)
        yield tensor.reshape(1, 1), Rows(torch.zeros(1, dtype=torch.int64), one, one, one)
        return
    inner, device = math.prod(shape[1:]), tensor.device
    if box.flat is None:
        dims = box.dims or tuple(((0, size),) for size in shape)
        held = torch.cat([torch.arange(start, stop) for start, stop in dims[0]])
        yield tensor.reshape(len(held), -1), _rows(held, shape, _columns(dims[1:], shape[1:], device))
        return
    start, stop = box.flat
    flat = tensor.reshape(-1)
    first, last = -(-start // inner), stop // inner  # full rows
    for begin, end in ((start, min(first * inner, stop)), (max(last * inner, start), stop)) if first <= last else ():
        if begin < end:
            columns = torch.arange(begin % inner, begin % inner + end - begin, device=device)
            yield flat[begin - start : end - start][None], _rows(torch.tensor([begin // inner]), shape, columns)
    if first < last:
        rows = flat[first * inner - start : last * inner - start].view(last - first, inner)
        yield rows, _rows(torch.arange(first, last), shape, torch.arange(inner, device=device))
    elif first > last:  # all of it within one row
        columns = torch.arange(start % inner, start % inner + stop - start, device=device)
        yield flat[None], _rows(torch.tensor([start // inner]), shape, columns)


def _rows(held: torch.Tensor, shape: Sequence[int], columns: torch.Tensor) -> Rows:
    rows, there = rows_of_block(shape), held.to(columns.device, non_blocking=True)
    return Rows(held // rows, there // rows, there % rows * math.prod(shape[1:]), columns)


def _add(part: torch.Tensor, rows: Rows, hashes: torch.Tensor, squares: torch.Tensor) -> None:
    """Add to each block the hash of its rows, which is the sum of words times the numbers of positions, and squares."""
    words = words_of(part.contiguous())
    height, width = part.shape[0], part.numel() // max(1, part.shape[0])
    words = words.reshape(height, width, -1)
    blocks, begins, columns = rows.blocks, rows.begins, rows.columns
    step, wide = max(1, _CHUNK // max(1, width)), _CHUNK
    for first in range(0, height, step):
        where = slice(first, first + step)
        for begin in range(0, width, wide):
            some = words[where, begin : begin + wide]
            places = begins[where, None] + columns[begin : begin + wide]
            hashes.index_add_(0, blocks[where], _weighted(some, places))
            squares.index_add_(0, blocks[where], _squares(part[where, begin : begin + wide]))


def _weighted(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the sums of words [rows, columns, words of an element] times the numbers of places [rows, columns]."""
    total = torch.zeros(words.shape[0], dtype=torch.int64, device=words.device)
    for number in range(words.shape[2]):
        mixed = (places * words.shape[2] + number + 1) * 0x1E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
        # Odd, so that no bit of an element is lost at the top.
        total = total + ((words[:, :, number].to(torch.int64) + 0x2545F491) * ((mixed ^ (mixed >> 32)) | 1)).sum(1)
    return total


def _columns(dims: Sequence[Spans], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the positions within a row of the elements of a part's rows, int64."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for spans, size in zip(dims, shape, strict=True):
        mine = [torch.arange(start, stop, device=device) for start, stop in spans]
        held = torch.cat(mine) if mine else torch.zeros(0, dtype=torch.int64, device=device)
        found = (found[:, None] * size + held).flatten()
    return found


def _squares(part: torch.Tensor) -> torch.Tensor:
    """Return the sums of the squares of rows, float64."""
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
    return part.reshape(part.shape[0], -1).to(torch.float64).square().sum(1)


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
