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
from shardproof.harness.states.maps import TRANSPOSED, rotated
from shardproof.harness.states.sides import Entry, EntryKey, Holding, State
from shardproof.harness.states.snapshot import EXTRA
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
    if other.order == TRANSPOSED and math.isclose(entry.total.squares, other.total.squares, rel_tol=_SAME_NORM):
        return None  # of digests alone
    if entry.shape != other.shape:
        return _of_shapes(entry, other, known)
    mine, its = entry.total, other.total
    if other.order and hashes_of(mine) == hashes_of(its):
        return Difference(entry.key, "order", ORDERED)
    other = _in_order(entry, other) if other.order else other
    its = other.total
    if entry.dtype != other.dtype:
        return _dtypes(entry, other, mine, its, known)
    wrong = [n for n in range(blocks.count_of(entry.shape)) if _hash(mine, n) != _hash(its, n) and n not in other.short]
    if not wrong or _is_ordered(entry, other):
        return None
    return _of_values(entry, other, known, wrong)


def _of_shapes(entry: Entry, other: Entry, known: Known) -> Difference:
    kind, text = _shapes(entry, other)
    same = _known_elsewhere(entry, other, Known(known.entries, ())) if kind == "shape" and other.held else None
    return Difference(entry.key, *((same[0], f"{same[1]}, and {text}") if same else (kind, text)))


def _is_ordered(entry: Entry, other: Entry) -> bool:
    """Whether a table says that the order is another, and there are digests alone, of one norm."""
    is_unread = bool(other.order) and other.load is None and entry.load is None
    return is_unread and _is_rearranged(entry.total, other.total)


def _of_values(entry: Entry, other: Entry, known: Known, wrong: list[int]) -> Difference:
    """Return what differs in the values of some blocks of two tensors of one shape and dtype."""
    mine, its = entry.total, other.total
    if entry.numel == 1:
        return Difference(entry.key, "value", f"is {size_of(its):g} for {size_of(mine):g}")
    if (same := _known_elsewhere(entry, other, known)) is not None:
        return Difference(entry.key, *same)
    if _is_rearranged(mine, its) and (same := _by_values(entry, other)) is not None:
        return Difference(entry.key, *same)
    texts = [*_zeros(entry, mine, its, wrong), *_moved(entry, mine, its, wrong)]
    texts += [] if texts else _stale_rows(entry, mine, other, wrong, known)
    if not texts and _is_rearranged(mine, its):
        return Difference(entry.key, "rearranged", REARRANGED)
    if texts:
        rest = [f"{rows_of(wrong, entry.shape)} have other values"] if wrong else []
        return Difference(entry.key, texts[0][0], "; ".join([*(text for _, text in texts), *rest]))
    return _of_a_change(entry, mine, its, known) or _by_distance(entry, mine, its, wrong)


#: The numbers of elements with which a relation of sketches is no chance, and how exact it is.
_LEAST, _EXACT = 8, 1e-3


def _of_a_change(entry: Entry, mine: Sums, its: Sums, known: Known) -> Difference | None:
    """Tell a change since an earlier state that was applied several times or in part, as an adapter merged twice."""
    for state in known.earlier:
        old = state.entries.get(entry.key)
        if old is None or old.shape != entry.shape or not old.held or entry.numel < _LEAST:
            continue
        before = old.total.sketch
        right = [one - two for one, two in zip(mine.sketch, before, strict=True)]
        found = [one - two for one, two in zip(its.sketch, before, strict=True)]
        norm = sum(one * one for one in right)
        if not 0 < norm < math.inf:
            continue
        times = sum(one * two for one, two in zip(right, found, strict=True)) / norm
        rest = math.sqrt(sum((two - times * one) ** 2 for one, two in zip(right, found, strict=True)) / norm)
        if rest <= _EXACT and min(abs(times), abs(times - 1)) > 10 * _EXACT:
            return Difference(entry.key, "change", f"has {times:.3g} times the change since {_named(state)}")
    return None


def size_of(sums: Sums) -> float:
    """Return the size of the number that a tensor of one element is: digests have no sign."""
    return math.sqrt(sums.squares)


#: Where a table says that the rows of heads are in another order, and they are not.
ORDERED = "has the rows of each head in the same order, which rotary embeddings of these names have otherwise"
REARRANGED = "has an equal norm, and its values at other places, as transposed or permuted, or with other signs"

#: Ranges of rows that a line has one by one.
_RUNS = 4

#: Sums of squares of the same elements in another order, in float64.
_SAME_NORM = 1e-12
#: The distance of tensors of one norm that are no rounding of each other.
_APART = 0.01


def _known_elsewhere(entry: Entry, other: Entry, known: Known) -> tuple[str, str] | None:
    """Tell a tensor of an earlier state, and that of another entry."""
    hashes = hashes_of(other.total)
    for state in known.earlier:
        old = state.entries.get(entry.key)
        if old is None or old.shape != entry.shape:
            continue
        if hashes_of(old.total) == hashes:
            return "stale", f"is that of {_named(state)}"
        kept = [one for one in other.parts if _has_kept(one, old, entry)]
        if kept and len(kept) < len(other.parts):
            return "stale", f"has the shard of {listed([one.source for one in kept])} of {_named(state)}"
    if other.total.squares:
        same = [key for key in known.entries.get(hashes, ()) if key.section in (entry.key.section, EXTRA)]
        same.sort(key=lambda key: not key.name.endswith(f".{entry.key.name}"))
        if same and entry.key not in same:
            return "another's", _like(entry.key, same[0])
    return None


def _has_kept(part: Holding, old: Entry, entry: Entry) -> bool:
    """Whether a rank has the shard of an earlier state, which is not that of the right one as far as that is known."""
    if part.box.is_full or not part.sums.squares:
        return False
    same = [one for one in old.parts if one.box == part.box and hashes_of(one.sums) == hashes_of(part.sums)]
    right = [one for one in entry.parts if one.box == part.box and hashes_of(one.sums) == hashes_of(part.sums)]
    return bool(same) and not right


def _named(state: State) -> str:
    return state.path + ("" if state.step is None else f", after step {state.step}")


def _like(key: EntryKey, source: EntryKey) -> str:
    """Say whose values an entry has; by the word in which the names differ, so that entries of a layer share a line."""
    if key.section == source.section and key.name == source.name:
        return f"has the values of {source.key} of the same parameter"
    mine, its = key.name.split("."), source.name.split(".")
    if key.key == source.key and len(mine) == len(its) and len(mine) > 2:
        differing = [place for place, (one, two) in enumerate(zip(mine, its, strict=True)) if one != two]
        if len(differing) == 1 and mine[differing[0]].isdigit():
            until = differing[0] + 1
            return f"has the values of its like in {'.'.join(its[:until])}"
    if source.section != key.section and source.name.endswith(f".{key.name}"):
        return f"has the values of its like in {source.name.removesuffix(f'.{key.name}')}"
    return f"has the values of {source}"


def _in_order(entry: Entry, other: Entry) -> Entry:
    """Return an entry with its rows in that order for rotary embeddings in which it is nearest to the right one."""
    if other.load is None:
        if entry.load is not None:
            for _, turned in rotated(entry.load()):
                (its,) = blocks.sums([turned.contiguous()], [Box(entry.shape)])
                if hashes_of(its) == hashes_of(other.total):
                    return dataclasses.replace(other, held=[dataclasses.replace(entry.parts[0], sums=entry.total)])
        return other
    best, least = other.total, _distance(entry.total, other.total)
    for _, turned in rotated(other.load()):
        (its,) = blocks.sums([turned.contiguous()], [Box(other.shape)])
        if hashes_of(its) == hashes_of(entry.total):
            best = its
            break
        if (distance := _distance(entry.total, its)) < least:
            best, least = its, distance
    return dataclasses.replace(other, held=[Holding(other.held[0].source, Box(other.shape), best)])


def _is_rearranged(mine: Sums, its: Sums) -> bool:
    """Whether two tensors have one norm, to its last digits, and are far apart."""
    is_same = 0 < mine.squares < math.inf and math.isclose(mine.squares, its.squares, rel_tol=_SAME_NORM)
    return is_same and _distance(mine, its) > _APART


def _stale_rows(entry: Entry, mine: Sums, other: Entry, wrong: list[int], known: Known) -> Iterator[tuple[str, str]]:
    """Tell blocks that have the values of an earlier state."""
    its = other.total
    for state in known.earlier:
        old = state.entries.get(entry.key)
        if old is None or old.shape != entry.shape or old.dtype != other.dtype:
            continue
        kept = [n for n in wrong if _hash(old.total, n) == _hash(its, n) and _squares(its, n) > 0]
        if kept:
            yield "stale", f"{rows_of(kept, entry.shape)}{whose_of(entry, kept)} are those of {_named(state)}"
            wrong[:] = [n for n in wrong if n not in kept]


def _zeros(entry: Entry, mine: Sums, its: Sums, wrong: list[int]) -> Iterator[tuple[str, str]]:
    zeros = [n for n in wrong if _squares(its, n) == 0 and _squares(mine, n) > 0]
    if zeros:
        all_of_it = len(zeros) == blocks.count_of(entry.shape)
        yield (
            "zeros",
            "is all zeros" if all_of_it else f"{rows_of(zeros, entry.shape)}{whose_of(entry, zeros)} are zeros",
        )
        wrong[:] = [n for n in wrong if n not in zeros]


def _moved(entry: Entry, mine: Sums, its: Sums, wrong: list[int]) -> Iterator[tuple[str, str]]:
    """Tell blocks that have the values of other blocks: exchanged, or repeated."""
    moved = _sources_of(entry, mine, its, wrong)
    swapped = {n: m for n, m in moved.items() if moved.get(m) == n}
    for first, second in _runs({n: m for n, m in swapped.items() if n < m}):
        yield "exchanged", f"{rows_of(first, entry.shape)} and {rows_of(second, entry.shape)} are exchanged"
    runs = [*_runs({n: m for n, m in moved.items() if n not in swapped})]
    if len(runs) > _RUNS:
        yield "repeated", f"{rows_of([*moved], entry.shape)} have the values of other rows"
        runs = []
    for first, second in runs:
        text = f"{rows_of(first, entry.shape)}{whose_of(entry, first)} have the values of"
        yield "repeated", f"{text} {rows_of(second, entry.shape)}{whose_of(entry, second)}".removesuffix(",")
    wrong[:] = [n for n in wrong if n not in moved]


def _sources_of(entry: Entry, mine: Sums, its: Sums, wrong: Sequence[int]) -> dict[int, int]:
    """Return where each wrong block was that another place has had; blocks of zeros are alike everywhere."""
    places: dict[int | None, int] = {}
    for n in range(blocks.count_of(entry.shape)):
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
    """Tell what only the values of a file show: a transpose of the same shape, and another order of rows of heads."""
    if other.load is None:
        return None
    tensor = other.load()
    if len(entry.shape) == 2 and entry.shape[0] == entry.shape[1] and _is(entry, tensor.t()):
        return "transposed", "is transposed"
    for count, turned in _shards_in_order(tensor):
        if _is(entry, turned):
            return "order", f"has its {count} shards of columns in another order"
    for size, turned in rotated(tensor):
        if _is(entry, turned):
            return "order", f"has the rows of each head of {size} in the other order of rotary embeddings"
    return None


#: Numbers of ranks that shard a tensor along its columns.
_SHARDS = (2, 4, 8)


def _shards_in_order(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a matrix with shards of its columns in other orders: exchanged by pairs, reversed, and interleaved."""
    for count in _SHARDS if tensor.ndim == 2 else ():
        shards = tensor.chunk(count, 1)
        if tensor.shape[1] % count == 0:
            for order in {(*[n ^ 1 for n in range(count)],), (*reversed(range(count)),),
                          (*range(0, count, 2), *range(1, count, 2)),
                          (*[n // 2 + count // 2 * (n % 2) for n in range(count)],)}:  # fmt: skip
                yield count, torch.cat([shards[n] for n in order], 1)


def _turned(entry: Entry, tensor: torch.Tensor) -> str:
    """Tell shards that were put together along another dimension than that along which they were cut."""
    rows, columns = entry.shape if len(entry.shape) == 2 and tensor.ndim == 2 else (0, 0)
    for mine, its, dim in ((rows, tensor.shape[0], 0), (columns, tensor.shape[-1], 1)) if rows else ():
        if mine and its > mine and its % mine == 0 and _is(entry, torch.cat(tensor.chunk(its // mine, dim), 1 - dim)):
            sides = ("one below the other", "side by side")
            return f"has {its // mine} shards {sides[dim]}, which belong {sides[1 - dim]}"
    return ""


def _by_distance(entry: Entry, mine: Sums, its: Sums, wrong: Sequence[int]) -> Difference:
    where = (
        ""
        if len(wrong) == blocks.count_of(entry.shape)
        else f" in {rows_of(wrong, entry.shape)}{whose_of(entry, wrong)}".removesuffix(",")
    )
    if not all(map(math.isfinite, its.sketch)) and all(map(math.isfinite, mine.sketch)):
        return Difference(entry.key, "not finite", f"is not finite{where}")
    if not any(mine.sketch):
        return Difference(entry.key, "not zero", "is not zero as it was")
    factor, rest = _factor(mine, its)
    if not where and rest <= _eps(entry.dtype) and abs(factor - 1) > 4 * _eps(entry.dtype):
        return Difference(entry.key, "factor", f"is {factor:.6g} times what it was")
    distance = _distance(mine, its)
    for bit, narrow in ((1, "bfloat16"), (2, "float16")):
        if mine.digits & bit and not its.digits & bit and distance <= _eps(narrow):
            return Difference(entry.key, "dtype", f"has values of {narrow} in {entry.dtype}", distance)
    return Difference(entry.key, "values", f"differs{where}", distance)


def _factor(mine: Sums, its: Sums) -> tuple[float, float]:
    """Return the factor by which a tensor is nearest to another, and the distance that is left, of the other's norm."""
    norm = sum(one * one for one in mine.sketch) or 1e-300
    factor = sum(one * two for one, two in zip(mine.sketch, its.sketch, strict=True)) / norm
    rest = sum((two - factor * one) ** 2 for one, two in zip(mine.sketch, its.sketch, strict=True)) / norm
    return factor, math.sqrt(rest) / max(abs(factor), 1e-300)


def _distance(mine: Sums, its: Sums) -> float:
    difference = sum((one - two) ** 2 for one, two in zip(mine.sketch, its.sketch, strict=True))
    return math.sqrt(difference / max(sum(one * one for one in mine.sketch), 1e-300))


def _dtypes(entry: Entry, other: Entry, mine: Sums, its: Sums, known: Known) -> Difference:
    distance = _distance(mine, its)
    rounding = max(_eps(entry.dtype), _eps(other.dtype))
    said = f"is {other.dtype} for {entry.dtype}"
    if distance <= rounding:
        return Difference(entry.key, "dtype", said, distance)
    if (same := _known_elsewhere(entry, other, Known({}, known.earlier))) is not None:
        return Difference(entry.key, same[0], f"{said}, and {same[1]}")
    factor, rest = _factor(mine, its)
    if rest <= rounding and abs(factor - 1) > rounding:
        return Difference(entry.key, "scaled", f"{said}, and scaled, by {factor:.3g}, as a quantised tensor is")
    wrong = [
        n
        for n in range(blocks.count_of(entry.shape))
        if not math.isclose(_squares(mine, n), _squares(its, n), rel_tol=8 * rounding, abs_tol=1e-300)
    ]
    where = f", most in {rows_of(wrong, entry.shape)}" if 0 < len(wrong) < blocks.count_of(entry.shape) else ""
    return Difference(entry.key, "values", f"{said}, and differs by more than its rounding{where}", distance)


def _shapes(entry: Entry, other: Entry) -> tuple[str, str]:
    """Tell what a tensor of another shape is: a shard, a transpose, or the values with padding."""
    said = f"has the shape {list(other.shape)} for {list(entry.shape)}"
    if other.numel == 0:
        return "empty", f"is an empty entry: {said}"
    if other.load is None:
        return _shapes_of_digests(entry, other, said)
    tensor = other.load()
    if len(entry.shape) == 2 and other.shape == entry.shape[::-1] and _is(entry, tensor.t()):
        return "transposed", f"is transposed: {said}"
    if (source := _owner_of(entry, tensor)) is not None:
        return "a shard", f"has the shard of {source} alone: {said}"
    if text := _turned(entry, tensor):
        return "turned", f"{text}: {said}"
    return _padded(entry, other, tensor, said)


def _shapes_of_digests(entry: Entry, other: Entry, said: str) -> tuple[str, str]:
    """Tell a transpose or padding by the norm, where there are no values."""
    if not 0 < entry.total.squares < math.inf:
        return "shape", said
    if math.isclose(entry.total.squares, other.total.squares, rel_tol=_SAME_NORM):
        if other.shape == entry.shape[::-1]:
            return "transposed", f"is transposed, by its norm: {said}"
        if other.shape[1:] == entry.shape[1:] and other.shape[0] > entry.shape[0]:
            return "padding", f"has {_rows(other.shape[0] - entry.shape[0])} of padding, by its norm: {said}"
    return "shape", said


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
    if entry.numel and other.shape and other.shape[1:] == entry.shape[1:] and more:
        return _longer(entry, tensor, said, more)
    if entry.numel and more >= 0 and _is(entry, tensor.reshape(-1)[: entry.numel].reshape(entry.shape)):
        is_flat = f"is flat, with {more} elements of padding: {said}"
        return ("padding", is_flat) if more else ("shape", f"{said}, with the same values")
    return "shape", said


def _longer(entry: Entry, tensor: torch.Tensor, said: str, more: int) -> tuple[str, str]:
    """Say what a tensor has that has ``more`` elements, in rows of the shape of the entry's."""
    count = tensor.shape[0] - (entry.shape[0] if entry.shape else 0)
    if more < 0:
        return ("cut", f"lacks the last {_rows(-count)}: {said}") if _is_beginning(entry, tensor) else ("shape", said)
    if _is(entry, tensor[count:]):
        return "padding", f"has {_rows(count)} of padding before the others: {said}"
    if _is(entry, tensor[: entry.shape[0]]):
        return "padding", f"has {_rows(count)} of padding: {said}"
    if entry.numel and _is(entry, tensor.reshape(-1)[: entry.numel].reshape(entry.shape)):
        return "padding", f"is flat, with {more} elements of padding: {said}"
    return "shape", said


def _is_beginning(entry: Entry, tensor: torch.Tensor) -> bool:
    """Whether a tensor of a file has the first rows of an entry, by the blocks of which it has all."""
    shape, rows = entry.shape, tensor.shape[0]
    if name_of(tensor.dtype) != entry.dtype or not rows:
        return False
    (its,) = blocks.sums([tensor], [Box(shape, (((0, rows),), *(((0, size),) for size in shape[1:])))])
    full = [n for n, block in its.blocks.items() if block.numel == blocks.numel_of(n, shape)]
    return bool(full) and all(_hash(its, n) == _hash(entry.total, n) for n in full)


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


def _eps(dtype: str) -> float:
    kind: Any = getattr(torch, dtype, None)
    return float(torch.finfo(kind).eps) if isinstance(kind, torch.dtype) and kind.is_floating_point else 0.0


def _rows(count: int) -> str:
    return f"{count} row{'s' * (count != 1)}"


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


def whose_of(entry: Entry, numbers: Sequence[int]) -> str:
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
