"""Differences between two tensors of one name: in their rows, their form, their dtype, or their distance.

Equal hashes of blocks say which rows have the values of other rows, and of which other entry or earlier state; sketches
say a factor or a distance. Only a file has values, by which transposes, shards and padding are found.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardproof.harness.states import blocks
from shardproof.harness.states.blocks import Sums
from shardproof.harness.states.sides import Entry, EntryKey, State
from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.watching.names import name_of


class Difference(NamedTuple):
    """A difference in one entry.

    Attributes:
        kind: "missing", "zeros" or another.
        text: the predicate of a sentence about the entry; entries with the same text share a line.
        distance: relative, of values that differ for no known reason; such entries share a line too.
    """

    key: EntryKey
    kind: str
    text: str
    distance: float = 0.0


@dataclasses.dataclass
class Known:
    """The other entries by their hashes, and the earlier states."""

    entries: dict[tuple[int, ...], list[EntryKey]]
    earlier: Sequence[State]


def of_tensors(entry: Entry, other: Entry, known: Known) -> Difference | None:
    """Return what differs between two tensors, or None if they are equal."""
    if entry.shape != other.shape:
        return Difference(entry.key, *_shapes(entry, other))
    mine, its = entry.total, other.total
    if entry.dtype != other.dtype:
        return _dtypes(entry, other, mine, its)
    wrong = [n for n in range(count_of_blocks(entry.shape)) if _hash(mine, n) != _hash(its, n)]
    if not wrong:
        return None
    if entry.numel == 1:
        return Difference(entry.key, "value", f"is {size_of(its):g} for {size_of(mine):g}")
    if (same := _known_elsewhere(entry, its, known) or _by_values(entry, other)) is not None:
        return Difference(entry.key, *same)
    texts = [*_zeros(entry, mine, its, wrong), *_moved(entry, mine, its, wrong)]
    if texts:
        rest = [f"{rows_of(wrong, entry.shape)} have other values"] if wrong else []
        return Difference(entry.key, texts[0][0], "; ".join([*(text for _, text in texts), *rest]))
    return _by_distance(entry, mine, its, wrong)


def size_of(sums: Sums) -> float:
    """Return the size of the number that a tensor of one element is: digests have no sign."""
    return math.sqrt(sums.squares)


def _known_elsewhere(entry: Entry, its: Sums, known: Known) -> tuple[str, str] | None:
    """Tell a tensor of an earlier state, and that of another entry."""
    hashes = hashes_of(its)
    for state in known.earlier:
        old = state.entries.get(entry.key)
        if old is not None and old.shape == entry.shape and hashes_of(old.total) == hashes:
            return "stale", f"is that of {state.path}" + ("" if state.step is None else f", after step {state.step}")
    if any(block.squares for block in its.blocks.values()):
        for key in known.entries.get(hashes, ()):
            if key != entry.key and key.section == entry.key.section:
                return "another's", f"has the values of {key}"
    return None


def _zeros(entry: Entry, mine: Sums, its: Sums, wrong: list[int]) -> Iterator[tuple[str, str]]:
    zeros = [n for n in wrong if _squares(its, n) == 0 and _squares(mine, n) > 0]
    if zeros:
        all_of_it = len(zeros) == count_of_blocks(entry.shape)
        yield "zeros", "is all zeros" if all_of_it else f"{rows_of(zeros, entry.shape)}{_whose(entry, zeros)} are zeros"
        wrong[:] = [n for n in wrong if n not in zeros]


def _moved(entry: Entry, mine: Sums, its: Sums, wrong: list[int]) -> Iterator[tuple[str, str]]:
    """Tell blocks that have the values of other blocks: exchanged, or repeated."""
    moved = _sources_of(entry, mine, its, wrong)
    swapped = {n: m for n, m in moved.items() if moved.get(m) == n}
    for first, second in _runs({n: m for n, m in swapped.items() if n < m}):
        yield "exchanged", f"{rows_of(first, entry.shape)} and {rows_of(second, entry.shape)} are exchanged"
    for first, second in _runs({n: m for n, m in moved.items() if n not in swapped}):
        text = f"{rows_of(first, entry.shape)}{_whose(entry, first)} have the values of"
        yield "repeated", f"{text} {rows_of(second, entry.shape)}{_whose(entry, second)}".removesuffix(",")
    wrong[:] = [n for n in wrong if n not in moved]


def _sources_of(entry: Entry, mine: Sums, its: Sums, wrong: Sequence[int]) -> dict[int, int]:
    """Return where each wrong block was that another place has had; blocks of zeros are alike everywhere."""
    places: dict[int | None, int] = {}
    for n in range(count_of_blocks(entry.shape)):
        if _squares(mine, n) > 0:
            places.setdefault(_hash(mine, n), n)
    return {n: places[hashed] for n in wrong if (hashed := _hash(its, n)) is not None and hashed in places}


def _runs(moved: Mapping[int, int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield blocks that moved together, and where they were."""
    runs: list[tuple[list[int], list[int]]] = []
    for n, m in sorted(moved.items()):
        if runs and runs[-1][0][-1] == n - 1 and runs[-1][1][-1] == m - 1:
            runs[-1][0].append(n)
            runs[-1][1].append(m)
        else:
            runs.append(([n], [m]))
    yield from runs


def _by_values(entry: Entry, other: Entry) -> tuple[str, str] | None:
    """Tell what only the values of a file show: a transpose of the same shape."""
    if other.load is None or len(entry.shape) != 2 or entry.shape[0] != entry.shape[1]:
        return None
    return ("transposed", "is transposed") if _is(entry, other.load().t()) else None


def _by_distance(entry: Entry, mine: Sums, its: Sums, wrong: Sequence[int]) -> Difference:
    where = (
        "" if len(wrong) == count_of_blocks(entry.shape) else f" in {rows_of(wrong, entry.shape)}{_whose(entry, wrong)}"
    )
    if not all(map(math.isfinite, its.sketch)) and all(map(math.isfinite, mine.sketch)):
        return Difference(entry.key, "not finite", f"is not finite{where}")
    norm = sum(one * one for one in mine.sketch)
    if norm == 0:
        return Difference(entry.key, "not zero", "is not zero as it was")
    factor = sum(one * two for one, two in zip(mine.sketch, its.sketch, strict=True)) / norm
    rest = sum((two - factor * one) ** 2 for one, two in zip(mine.sketch, its.sketch, strict=True)) / norm
    if not where and math.sqrt(rest) <= _eps(entry.dtype) and abs(factor - 1) > 4 * _eps(entry.dtype):
        return Difference(entry.key, "factor", f"is {factor:.6g} times what it was")
    return Difference(entry.key, "values", f"differs{where}", _distance(mine, its))


def _distance(mine: Sums, its: Sums) -> float:
    difference = sum((one - two) ** 2 for one, two in zip(mine.sketch, its.sketch, strict=True))
    return math.sqrt(difference / max(sum(one * one for one in mine.sketch), 1e-300))


def _dtypes(entry: Entry, other: Entry, mine: Sums, its: Sums) -> Difference:
    distance = _distance(mine, its)
    rounding = max(_eps(entry.dtype), _eps(other.dtype))
    said = f"is {other.dtype} for {entry.dtype}"
    if distance <= rounding:
        return Difference(entry.key, "dtype", said, distance)
    wrong = [
        n
        for n in range(count_of_blocks(entry.shape))
        if not math.isclose(_squares(mine, n), _squares(its, n), rel_tol=8 * rounding, abs_tol=1e-300)
    ]
    where = f", most in {rows_of(wrong, entry.shape)}" if 0 < len(wrong) < count_of_blocks(entry.shape) else ""
    return Difference(entry.key, "values", f"{said}, and differs by more than its rounding{where}", distance)


def _shapes(entry: Entry, other: Entry) -> tuple[str, str]:
    """Tell what a tensor of another shape is: a shard, a transpose, or the values with padding."""
    said = f"has the shape {list(other.shape)} for {list(entry.shape)}"
    if other.numel == 0:
        return "empty", f"is an empty entry: {said}"
    if other.load is None:
        return "shape", said
    tensor = other.load()
    if len(entry.shape) == 2 and other.shape == entry.shape[::-1] and _is(entry, tensor.t()):
        return "transposed", f"is transposed: {said}"
    if (source := _owner_of(entry, tensor)) is not None:
        return "a shard", f"has the shard of {source} alone: {said}"
    return _padded(entry, other, tensor, said)


def _owner_of(entry: Entry, tensor: torch.Tensor) -> str | None:
    """Return the rank whose shard a tensor of a file is."""
    for one in entry.held:
        if not one.box.is_full and tensor.numel() == one.box.numel:
            shard = tensor.reshape(-1) if one.box.flat else tensor.reshape(one.box.held_shape)
            (its,) = blocks.sums([shard], [one.box])
            if hashes_of(its) == hashes_of(one.sums):
                return one.source
    return None


def _padded(entry: Entry, other: Entry, tensor: torch.Tensor, said: str) -> tuple[str, str]:
    more = tensor.numel() - entry.numel
    if not entry.numel or more < 0:
        return "shape", said
    if other.shape[1:] == entry.shape[1:] and more and _is(entry, tensor[: entry.shape[0]]):
        return "padding", f"has {other.shape[0] - entry.shape[0]} rows of padding: {said}"
    if _is(entry, tensor.reshape(-1)[: entry.numel].reshape(entry.shape)):
        is_flat = f"is flat, with {more} elements of padding: {said}"
        return ("padding", is_flat) if more else ("shape", f"{said}, with the same values")
    return "shape", said


def _is(entry: Entry, tensor: torch.Tensor) -> bool:
    """Whether a tensor of a file has the values of an entry."""
    if tuple(tensor.shape) != entry.shape or name_of(tensor.dtype) != entry.dtype:
        return False
    (its,) = blocks.sums([tensor], [Box(entry.shape)])
    return hashes_of(its) == hashes_of(entry.total)


def hashes_of(sums: Sums) -> tuple[int, ...]:
    """Return what is equal for equal elements: number, hash and size of each block."""
    return tuple(part for number, block in sorted(sums.blocks.items()) for part in (number, block.hash, block.numel))


def _hash(sums: Sums, number: int) -> int | None:
    found = sums.blocks.get(number)
    return None if found is None else found.hash


def _squares(sums: Sums, number: int) -> float:
    found = sums.blocks.get(number)
    return 0.0 if found is None else found.squares


def count_of_blocks(shape: Sequence[int]) -> int:
    """Return the number of blocks of a tensor."""
    if not math.prod(shape):
        return 0
    return -(-shape[0] // blocks.rows_of_block(shape)) if shape else 1


def _eps(dtype: str) -> float:
    kind: Any = getattr(torch, dtype, None)
    return float(torch.finfo(kind).eps) if isinstance(kind, torch.dtype) and kind.is_floating_point else 0.0


def rows_of(numbers: Sequence[int], shape: Sequence[int]) -> str:
    """Name the rows of some blocks: "rows 0-3 and 8 of 16"."""
    rows, spans = blocks.rows_of_block(shape), list[list[int]]()
    for number in sorted(numbers):
        start, stop = number * rows, min((number + 1) * rows, shape[0] if shape else 1)
        if spans and spans[-1][1] == start:
            spans[-1][1] = stop
        else:
            spans.append([start, stop])
    told = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in spans[:4]]
    more = f" and {len(spans) - 4} more ranges" if len(spans) > 4 else ""
    return f"rows {', '.join(told)}{more} of {shape[0] if shape else 1}"


def _whose(entry: Entry, numbers: Sequence[int]) -> str:
    """Name the rank whose shard some blocks are, if they are one's."""
    chosen = set(numbers)
    for one in entry.parts:
        mine = {number for number, block in one.sums.blocks.items() if block.numel}
        if len(entry.parts) > 1 and mine == chosen:
            return f", the shard of {one.source},"
    return ""


def listed(sources: Sequence[str]) -> str:
    """Name at most four ranks or files."""
    return ", ".join(sources[:4]) + (f" and {len(sources) - 4} more" if len(sources) > 4 else "")
