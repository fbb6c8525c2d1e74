"""Compares labels of a cross-entropy with the inputs of the forward, and tells rows of inputs apart."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from shardproof.harness.tensors.fingerprints import row_hashes, strided
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching.records import Labels

#: The shortest row of tokens, and the longest, of which a roll is told from a shift.
_SHORTEST, _LONGEST = 4, 1 << 16

#: How many rows are looked through for pairs of tokens, and how many elements stand for a tensor.
_MOST_ROWS, _MOST_ELEMENTS = 16, 64

#: How many rows of a batch have a number, and from how many elements.
_MOST_OF_BATCH, _MOST_OF_ROW = 1024, 1024

#: The fewest different values of drawn numbers among these.
_FEWEST = 6

#: The fewest rows of which columns are told apart, and of how many columns each has a number.
_FEWEST_ROWS, _MOST_COLUMNS = 8, 128

#: One of so many steps from row to row goes down, and one goes up, in a column that is no grid.
_PART_OF_STEPS = 5


class Tokens:
    """The integer inputs of a forward, for as long as user code keeps them as they were."""

    def __init__(self) -> None:
        self._all: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def take(self, inputs: Sequence[torch.Tensor]) -> None:
        """Take those of the next forward."""
        plain = [one for one in inputs if type(one) is torch.Tensor and not one.is_inference()]
        self._all = [
            (weakref.ref(one), one._version)
            for one in plain
            if not (one.is_floating_point() or one.is_complex() or one.dtype == torch.bool) and 1 <= one.ndim <= 2
        ]

    def of_size(self, numel: int) -> Iterator[torch.Tensor]:
        """Yield those with so many elements."""
        for ref, version in self._all:
            tensor = ref()
            if tensor is not None and tensor._version == version and tensor.numel() == numel:
                yield tensor


class Compared(NamedTuple):
    """Labels, as they are compared on their device; see :class:`records.Labels`.

    Attributes:
        size: how many labels there are.
        flags: whether they count up by one, the first of them, and whether they are the inputs rolled.
        rows: of the inputs with as many elements; 0 without such inputs.
    """

    size: int
    columns: int
    rows: int
    flags: torch.Tensor

    def record(self, flags: Sequence[int]) -> Labels:
        """Return what a record has of them, with the flags on the host."""
        return Labels(self.size, self.columns, flags[1] if flags[0] else None, self.rows, bool(flags[2]))


@torch.no_grad()
def compared(target: torch.Tensor, columns: int, tokens: Tokens) -> Compared | None:
    """Compare labels with the inputs of the forward; None where there is nothing to tell of them."""
    if target.numel() < 2:
        return None
    target = target.detach().long()
    rows, is_rolled = 0, target.new_zeros(())
    for inputs in tokens.of_size(target.numel()):
        for own, labels in _as_rows(inputs, target.reshape(inputs.shape)):
            rows, is_rolled = max(rows, len(own)), is_rolled | _is_rolled(own, labels)
    counts_up = (target.diff() == 1).all().long() if target.ndim == 1 else target.new_zeros(())
    return Compared(target.numel(), columns, rows, torch.stack([counts_up, target.reshape(-1)[0], is_rolled]))


def _as_rows(inputs: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and labels as rows: of one dimension one row; of two either may be that of the sequence."""
    pairs = [(inputs[None], labels[None])] if inputs.ndim == 1 else [(inputs, labels), (inputs.mT, labels.mT)]
    for own, of_own in pairs:
        if _SHORTEST <= own.shape[1] <= _LONGEST:
            yield own, of_own


def _is_rolled(row: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Whether labels are the next tokens, and the last ones the first, which the tokens do not go on with by nature.

    In tokens of a short period a row may well go on with its first one: then this pair is found inside of rows.
    """
    is_next = (labels[:, :-1] == row[:, 1:]).all() & (labels[:, -1] == row[:, 0]).all()
    few = row[: max(1, min(_MOST_ROWS, _LONGEST // row.shape[1]))]
    inside = torch.stack([few[:, :-1].reshape(-1), few[:, 1:].reshape(-1)])
    ends = torch.stack([few[:, -1], few[:, 0]])
    is_found = (ends[:, :, None] == inside[:, None]).all(0).any(-1)
    return (is_next & (is_found.sum() * 2 <= len(few))).long()


@torch.no_grad()
def varies(tensor: torch.Tensor) -> torch.Tensor:
    """Whether a tensor has many values, not in steps of one size, as noise has and no position; on its device."""
    flat = strided(local_of(tensor.detach())).reshape(-1)
    if flat.numel() < _FEWEST or flat.dtype == torch.bool or flat.is_complex():
        return torch.zeros((), dtype=torch.bool, device=flat.device)
    some = flat[:: max(1, flat.numel() // _MOST_ELEMENTS)][:_MOST_ELEMENTS]
    some = some.float() if some.is_floating_point() else some.long()
    steps = some.diff()
    different = (some.sort().values.diff() != 0).sum() + 1
    return (different >= max(_FEWEST, some.numel() // 4)) & (steps != steps[0]).any()


@torch.no_grad()
def rows_of(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return a number for each row of a tensor with so many rows, of some if there are many; on its device.

    Elements at equal distances stand for a long row.
    """
    local = strided(local_of(tensor.detach()))
    if local.ndim < 1 or len(local) != count or not count or not local.numel():
        return torch.zeros(0, dtype=torch.int64, device=local.device)
    flat = local[:_MOST_OF_BATCH].reshape(min(count, _MOST_OF_BATCH), -1)
    return row_hashes(flat[:, :: max(1, flat.shape[1] // _MOST_OF_ROW)])


@torch.no_grad()
def columns_of(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return a number for each column of a tensor with so many rows, of some if there are many; on its device.

    It is zero of a column of one value, odd of one whose values are many and go up and down, as drawn ones do, and else
    even, as of positions, of a grid, and of padding. All dimensions but the first are taken for one.
    """
    local = strided(local_of(tensor.detach()))
    is_table = local.ndim > 1 and len(local) == count >= _FEWEST_ROWS and local.numel() > count
    if not is_table or local.dtype == torch.bool or local.is_complex():
        return torch.zeros(0, dtype=torch.int64, device=local.device)
    flat = local[:_MOST_OF_BATCH].reshape(min(count, _MOST_OF_BATCH), -1)
    flat = flat[:, :: -(-flat.shape[1] // _MOST_COLUMNS)]
    some = flat.float() if flat.is_floating_point() else flat.long()
    steps, different = some.diff(dim=0), (some.sort(0).values.diff(dim=0) != 0).sum(0) + 1
    ups, downs = (steps > 0).sum(0), (steps < 0).sum(0)
    varies = (different >= _FEWEST) & (_PART_OF_STEPS * torch.minimum(ups, downs) >= ups + downs)
    return torch.where(different > 1, row_hashes(flat.mT.contiguous()) // 2 * 2 + varies, 0)
