"""Digests of the blocks of rows of a full tensor, which add over the parts that ranks or files hold of them.

A full tensor is divided along its first dimension into at most :data:`MOST` blocks of equally many rows. A block has a
hash and the sum of its squares. The hash is a sum over the block's elements, modulo 2^64, of the bits of an element
times an odd number for its row in the block and one for its place in the row. The hash of a block is therefore the sum
of those of its parts, exactly, whatever cuts it, and equal blocks have equal hashes wherever they stand. A tensor also
has the sketch of ``tensors.fingerprints``, by which distances are known between tensors that are not equal.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from shardproof.harness.states.cuts import Tile, extent, tiles
from shardproof.harness.tensors.fingerprints import FEW, Box, K, of_pairs, strided, words_of
from shardproof.harness.tensors.pieces import Spans

MOST = 64
"""The most blocks of a tensor."""

#: Elements that are read at a time: on the CPU so many that copies in 8 bytes stay in a cache; elsewhere so many that
#: kernels are few, of which each takes longer than its launch. Two such copies are held, and one of smaller tensors.
_WIDE = 1 << 17
_WIDE_OF_ACCELERATORS = 1 << 25

#: The first elements of a tensor, which tell its digits unless they are all short.
_FIRST = 1 << 13

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


class Tables(NamedTuple):
    """The digests of many parts, on the host.

    Attributes:
        hashes: int64 [parts, MOST], modulo 2^64; 0 of a block of which a part has nothing.
        squares: float64 [parts, MOST].
        sketches: float64 [parts, K].
        digits: see :class:`Sums`.
    """

    hashes: torch.Tensor
    squares: torch.Tensor
    sketches: torch.Tensor
    digits: Sequence[int]


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


@functools.lru_cache(maxsize=4096)
def numels_of(box: Box) -> Mapping[int, int]:
    """Return how many elements a part has of each block of which it has any, by the number of the block,
    in the order of these.
    """
    shape, found = box.shape, collections.Counter[int]()
    if not box.numel:
        return found
    height, inner = rows_of_block(shape), math.prod(shape[1:])
    if box.flat is not None or not shape:
        spans: Spans = (box.flat or (0, 1),)
        size, width = height * inner, 1
    else:
        dims = box.dims or tuple(((0, size),) for size in shape)
        spans, size, width = dims[0], height, math.prod(box.held_shape[1:])
    for start, stop in spans:
        for block in range(start // size, -(-stop // size)):
            found[block] += (min(stop, (block + 1) * size) - max(start, block * size)) * width
    return dict(sorted(found.items()))


@torch.no_grad()
def sums(tensors: Sequence[torch.Tensor], boxes: Sequence[Box]) -> list[Sums]:
    """Return the sums of parts of tensors; they are copied to the host together.

    Args:
        tensors: plain, of any dtype and device; the elements of the boxes in their order.
        boxes: which elements of the full tensors they are.
    """
    digester = Digester()
    for tensor, box in zip(tensors, boxes, strict=True):
        digester.add(tensor, box)
    hashes, squares, sketches, digits = digester.tables()
    parts = zip(boxes, hashes.tolist(), squares.tolist(), sketches.tolist(), digits, strict=True)
    return [
        sums_of(box, [own[one] for one in numels_of(box)], [its[one] for one in numels_of(box)], sketch, digit)
        for box, own, its, sketch, digit in parts
    ]


def sums_of(box: Box, hashes: Sequence[int], squares: Sequence[float], sketch: Sequence[float], digits: int) -> Sums:
    """Return the sums of a part, of which hashes and squares are those of the blocks of :func:`numels_of`, in order."""
    found: dict[int, BlockSums] = {}
    for (block, numel), number, square in zip(numels_of(box).items(), hashes, squares, strict=True):
        found[block] = BlockSums(number & _MASK, square, numel)
    return Sums(found, tuple(sketch), digits)


class _Group:
    """Parts of one shape, dtype, device and place, which are read together: their numbers, and they."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.parts: list[torch.Tensor] = []


class _Read(NamedTuple):
    """The numbers of parts that are read together, for a tile: what does not depend on its blocks.

    Attributes:
        hashes: of rows, without their own numbers, int64 [parts, rows].
        squares: of rows, float64 [parts, rows].
        sketches: float64; of few rows for each of them [parts, rows, K], otherwise for each column [parts, K, columns].
    """

    hashes: torch.Tensor
    squares: torch.Tensor
    sketches: torch.Tensor


class _Kept(NamedTuple):
    """Parts of one shape, dtype, device and place that were read, some at a time.

    Attributes:
        cut: the tiles in which they were read.
        numbers: of the parts.
        reads: of those that were read together, what was read of each tile.
        digits: of these, bits of their first elements, int32 [parts, elements].
    """

    cut: Sequence[Tile]
    numbers: list[int]
    reads: list[list[_Read]]
    digits: list[torch.Tensor]


class Digester:
    """Makes the digests of parts, on their devices, while more of them are added."""

    def __init__(self) -> None:
        self._groups: dict[tuple[object, Box], _Group] = {}
        self._kept: dict[object, _Kept] = {}
        self._made: list[tuple[list[int], torch.Tensor]] = []
        self._parts: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor, box: Box) -> None:
        """Take one more part; see :func:`sums`. It is kept as long as this object is."""
        part = strided(tensor.detach())
        # Small ones not one by one: kernels take less time than their launches. Large ones are not copied for it.
        kind = part.shape, part.dtype, part.device, part.is_conj()
        group = self._groups.setdefault((kind, box), _Group())
        group.numbers.append(len(self._parts))
        group.parts.append(part)
        self._parts.append(part)
        wide = _wide_on(part.device)
        if part.numel() >= wide // 4 or (len(group.parts) + 1) * part.numel() > wide:
            self._read(group, box)

    def end(self) -> None:
        """Let the devices read what is left of the parts; none is added after it."""
        for (_, box), group in self._groups.items():
            self._read(group, box)
        for kept in self._kept.values():
            table = _table(len(kept.numbers), kept.digits[0].device)
            for tile, *reads in zip(kept.cut, *kept.reads, strict=True):
                _add(table, tile, _Read(*(torch.cat(some) for some in zip(*reads, strict=True))))
            self._finish(kept.numbers, table, torch.cat(kept.digits))
        self._groups, self._kept = {}, {}

    def tables(self) -> Tables:
        """Return the digests of all parts, in their order; their devices are waited for."""
        self.end()
        rows = torch.zeros(len(self._parts), 2 * MOST + K + 1, dtype=torch.int64)
        for device in {table.device for _, table in self._made}:
            its = [(numbers, table) for numbers, table in self._made if table.device == device]
            rows[[number for numbers, _ in its for number in numbers]] = torch.cat([table for _, table in its]).cpu()
        hashes, squares, sketches, last = rows.split([MOST, MOST, K, 1], 1)
        digits = last.flatten().tolist()
        for number, part in enumerate(self._parts):
            if part.dtype == torch.float32 and part.numel() > _FIRST:
                # Read again if the first elements are short, such as zeros, or what was rounded: rare.
                digits[number] = 3 if digits[number] & 2 else int(_digits(part.contiguous().view(-1).view(torch.int32)))
        return Tables(
            hashes.contiguous(), squares.contiguous().view(torch.float64), sketches.contiguous().view(torch.float64),
            digits,
        )  # fmt: skip

    def _read(self, group: _Group, box: Box) -> None:
        """Read parts together; what is done row by row and column by column waits for others that are alike."""
        if not group.parts:
            return
        first, numbers, count = group.parts[0], group.numbers, len(group.parts)
        stack = first.contiguous()[None] if count == 1 else torch.stack(group.parts)
        group.numbers, group.parts = [], []
        if stack.is_complex():
            stack, box = torch.view_as_real(stack.resolve_conj()), of_pairs(box if box.shape else Box((1,)))
        stack = stack.reshape(count, -1)
        words = words_of(stack)
        bits = words[:, :_FIRST].clone() if stack.dtype == torch.float32 else words[:, :0].to(torch.int32)
        wide = max(1, _wide_on(first.device) // count)
        place = box, wide, stack.element_size(), first.device
        if (kept := self._kept.get((place, first.dtype))) is None:
            cut = tiles(box, rows_of_block(box.shape), *place[1:])
            if 16 * extent(box) > box.numel:  # what is read of rows and columns takes as much room as the part
                table = _table(count, first.device)
                for tile in cut:
                    _add(table, tile, _read_tile(stack, words, tile))
                self._finish(numbers, table, bits)
                return
            kept = self._kept[place, first.dtype] = _Kept([*cut], [], [], [])
        kept.numbers.extend(numbers)
        kept.reads.append([_read_tile(stack, words, tile) for tile in kept.cut])
        kept.digits.append(bits)

    def _finish(self, numbers: list[int], table: torch.Tensor, bits: torch.Tensor) -> None:
        if bits.shape[1]:
            table[:, -1] += _digits(bits)
        self._made.append((numbers, table))


def _wide_on(device: torch.device) -> int:
    return _WIDE if device.type == "cpu" else _WIDE_OF_ACCELERATORS


def _read_tile(stack: torch.Tensor, words: torch.Tensor, tile: Tile) -> _Read:
    """Read a tile of parts [parts, elements], of which ``words`` has the bits."""
    hashes = tile.products(words).sum(2)
    values = tile.of(stack).to(torch.float64)
    if values.shape[1] < FEW:
        return _Read(hashes, _squares(values), values @ tile.right.t())
    return _Read(hashes, _squares(values), torch.bmm(tile.left.expand(len(values), -1, -1), values))


def _table(count: int, device: torch.device) -> torch.Tensor:
    """Return zeros for the hashes, squares, sketch and digits of so many parts: int64 [parts, 2 * MOST + K + 1]."""
    return torch.zeros(count, 2 * MOST + K + 1, dtype=torch.int64, device=device)


def _add(table: torch.Tensor, tile: Tile, read: _Read) -> None:
    """Add what was read of a tile to a table."""
    hashes, squares, sketches, _ = table.split([MOST, MOST, K, 1], 1)
    hashes.index_add_(1, tile.blocks, read.hashes * tile.row_numbers)
    squares.view(torch.float64).index_add_(1, tile.blocks, read.squares)
    if read.squares.shape[1] < FEW:
        sketches.view(torch.float64).add_((read.sketches * tile.left.t()).sum(1))
    else:
        sketches.view(torch.float64).add_((read.sketches * tile.right).sum(2))


def _squares(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of the squares of rows, by what is fast on a device: float64 [tensors, rows]."""
    if values.device.type == "cpu":
        return values.square().sum(2)
    norms: torch.Tensor = torch.linalg.vector_norm(values, dim=2)
    return norms.square_()


#: The bits of a float32 element beyond those of bfloat16, and beyond those of float16.
_SHORT = 0xFFFF, 0x1FFF


def _digits(words: torch.Tensor) -> torch.Tensor:
    """Return which digits float32 elements have, as ``Sums.digits``, over the last dimension of their bits."""
    more = [(words & mask).any(-1).to(torch.int64) for mask in _SHORT]
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
