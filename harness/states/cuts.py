"""How a part of a tensor is read: in matrices of rows and columns of the full one, with the numbers of their places."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from shardproof.harness.tensors.fingerprints import Box, column_weights, row_weights
from shardproof.harness.tensors.pieces import Spans

#: The most rows, and columns, of a matrix: their weights take 64 bytes each.
_MOST = 1 << 20


class Piece(NamedTuple):
    """A matrix of elements of a part, which has several rows of the full tensor and of each the same columns.

    Attributes:
        start: where the matrix in which it lies begins in the flattened part.
        shape: of the matrix in which it lies.
        rows, columns: its own ranges there.
        blocks: of each row its block, int64.
        row_numbers, column_numbers: of each row in its block, and of each column, a number, int64; see :func:`pieces`.
        left, right: of each row, and of each column, the weights of the sketch, float64 [K, ..].
        pair_numbers: of each pair of columns its number; None if they are not pairs.
    """

    start: int
    shape: tuple[int, int]
    rows: slice
    columns: slice
    blocks: torch.Tensor
    row_numbers: torch.Tensor
    column_numbers: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    pair_numbers: torch.Tensor | None

    def products(self, words: torch.Tensor) -> torch.Tensor:
        """Return products of which the sums are the hashes of rows, modulo 2^64: int64 [parts, rows, ...].

        Args:
            words: integers, of flattened parts [parts, elements].
        """
        mine = self.of(words)
        if words.dtype != torch.int32:
            return mine * self.column_numbers
        if self.pair_numbers is not None and not any(one % 2 for one in (mine.storage_offset(), *mine.stride()[:2])):
            return mine.view(torch.int64) * self.pair_numbers
        # A word of a pair is one without a sign, but for the second, of which the sign is lost at the top.
        return (mine.to(torch.int64) & 0xFFFFFFFF) * self.column_numbers

    def of(self, parts: torch.Tensor) -> torch.Tensor:
        """Return a view of its elements: [parts, rows, columns], of flattened parts [parts, elements]."""
        height, width = self.shape
        if parts.shape[1] == height * width:  # each view takes as long as a small kernel
            found = parts.view(len(parts), height, width)
            return found if self.is_all else found[:, self.rows, self.columns]
        flat = parts[:, self.start : self.start + height * width]
        return flat.view(len(parts), height, width)[:, self.rows, self.columns]

    @property
    def is_all(self) -> bool:
        """Whether it is all of the matrix in which it lies."""
        return (self.rows.stop - self.rows.start, self.columns.stop - self.columns.start) == self.shape


def extent(box: Box) -> int:
    """Return about how many rows and columns a part has, together."""
    inner = math.prod(box.shape[1:])
    if box.flat is not None:
        return box.numel // max(1, inner) + inner
    rows = box.held_shape[0] if box.shape else 1
    return rows + box.numel // max(1, rows)


def pieces(box: Box, rows_of_block: int, wide: int, itemsize: int, device: torch.device) -> Iterator[Piece]:
    """Yield the pieces of a part, of about so many elements at most.

    The numbers are odd, so that no bit of an element is lost at the top, but for one: a word of 4 bytes at an odd place
    of a row has the number of the place before it times 2^32. Two that lie side by side are read as one word of 8
    bytes, and half as many products are made; the second has 32 bits of the hash.

    Args:
        box: which elements of the full tensor it has.
        rows_of_block: how many rows have one number after the other.
        wide: how many elements a piece has at most.
        itemsize: the bytes of an element.
        device: where the numbers are needed.
    """
    for start, rows, columns in _matrices(box):
        height, width = len(rows), len(columns)
        across = min(width, wide, _MOST)
        across += across % 2 * (across < width)
        down = min(max(1, wide // max(1, across)), _MOST)
        are_pairs = itemsize == 4 and _are_pairs(columns)
        rows, columns = rows.to(device), columns.to(device)
        for column in range(0, width, across):
            some = columns[column : column + across]
            odd = some % 2 if itemsize == 4 else torch.zeros_like(some)
            numbers, right = _numbers(some - odd, _OF_COLUMNS) << (32 * odd), column_weights(box.shape, some).t()
            pairs = numbers[::2].contiguous() if are_pairs else None
            for row in range(0, height, down):
                mine = rows[row : row + down]
                yield Piece(
                    start, (height, width), slice(row, row + len(mine)), slice(column, column + len(some)),
                    mine // rows_of_block, _numbers(mine % rows_of_block, _OF_ROWS), numbers,
                    row_weights(box.shape, mine).t(), right, pairs,
                )  # fmt: skip


def _are_pairs(columns: torch.Tensor) -> bool:
    """Whether places of columns are pairs of an even one and the one behind it."""
    if len(columns) % 2:
        return False
    first, second = columns[::2], columns[1::2]
    return not bool((first % 2).any()) and torch.equal(first + 1, second)


_OF_ROWS, _OF_COLUMNS = 0x2545F491, 0x7F4A7C15


def _numbers(places: torch.Tensor, salt: int) -> torch.Tensor:
    """Return a number for each place, int64, odd, so that no bit of an element is lost at the top."""
    mixed = (places + salt) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 32)) | 1


def _matrices(box: Box) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield where a matrix begins in a flattened part, its rows and its columns; a range may end within a row."""
    shape = box.shape
    if not box.numel:
        return
    if not shape:
        yield 0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        return
    inner = math.prod(shape[1:])
    if box.flat is None:
        dims = box.dims or tuple(((0, size),) for size in shape)
        yield 0, _places(dims[:1], shape[:1]), _places(dims[1:], shape[1:])
        return
    start, stop = box.flat
    first, last = -(-start // inner), stop // inner  # full rows
    if first > last:  # all of it within one row
        yield 0, torch.tensor([start // inner]), torch.arange(start % inner, start % inner + stop - start)
        return
    for begin, end in ((start, first * inner), (last * inner, stop)):
        if begin < end:
            columns = torch.arange(begin % inner, begin % inner + end - begin)
            yield begin - start, torch.tensor([begin // inner]), columns
    if first < last:
        yield first * inner - start, torch.arange(first, last), torch.arange(inner)


def _places(dims: Sequence[Spans], shape: Sequence[int]) -> torch.Tensor:
    """Return the positions, in the flattened dimensions, of the elements of spans of each, int64."""
    found = torch.zeros(1, dtype=torch.int64)
    for spans, size in zip(dims, shape, strict=True):
        held = torch.cat([torch.arange(start, stop) for start, stop in ((0, 0), *spans)])
        found = (found[:, None] * size + held).flatten()
    return found
