"""Says what differs between two states of a training, entry by entry, with the amount and the place.

An entry is equal if the hashes of all its blocks are. Otherwise its blocks say more: which rows are zeros, which have
the values of other rows, which were those of an earlier state; and its sketch says the factor, or the distance.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardproof.harness.judging.texts import rank_count
from shardproof.harness.states import blocks
from shardproof.harness.states.blocks import Sums
from shardproof.harness.states.sides import Entry, Key, State
from shardproof.harness.states.snapshot import MODEL, OPTIMIZER, SCHEDULER
from shardproof.harness.tensors.fingerprints import Box

_NAMES = 3  # of entries that a line lists

#: What two states are compared in; the last words of a state are its own.
_SECTIONS = (MODEL, OPTIMIZER, SCHEDULER)


class Difference(NamedTuple):
    """What differs in one entry.

    Attributes:
        kind: of what kind it is, such as "missing" or "zeros".
        text: what is said of it; entries of which the same is said are told together.
        distance: relative, of values that differ for no reason that is known; such entries are told together too.
    """

    key: Key
    kind: str
    text: str
    distance: float = 0.0


@dataclasses.dataclass
class _Known:
    """What the other entries and the earlier states have, by hashes."""

    entries: dict[tuple[int, ...], list[Key]]
    earlier: Sequence[State]


def compare(a: State, b: State, *, earlier: Sequence[State] = ()) -> list[Difference]:
    """Return what ``b`` has otherwise than ``a``, in the order of ``a``; entries that only ``b`` has are last.

    Args:
        a: the state as it should be.
        b: with the names of ``a``; see ``sides.aligned``.
        earlier: states of the same training, which ``b`` may have entries of.
    """
    known = _Known({}, earlier)
    for key, entry in a.entries.items():
        if entry.is_tensor and entry.numel > 1:
            known.entries.setdefault(_hashes(entry.total), []).append(key)
    sections = [one for one in _SECTIONS if any(key.section == one for key in b.entries)]
    found = [*_sections_missing(a, sections)]
    for key, entry in a.entries.items():
        if key.section in sections and entry.kind != "unsaved buffer":
            found += _entry(entry, b.entries.get(key), a, b, known)
    extra = [entry for key, entry in b.entries.items() if key not in a.entries and key.section in sections]
    found += [Difference(one.key, "unexpected", f"{_kind(one)} that {a.path} does not have") for one in extra]
    return found


def check(state: State) -> Iterator[Difference]:
    """Yield what is wrong within one state: replicas that differ, rows that nobody holds."""
    for key, entry in state.entries.items():
        by_box: dict[Box, dict[tuple[int, ...], list[str]]] = {}
        for one in entry.held:
            by_box.setdefault(one.box, {}).setdefault(_hashes(one.sums), []).append(one.source)
        for holders in by_box.values():
            if len(holders) > 1:
                sets = " and ".join(_sources(some) for some in holders.values())
                yield Difference(key, "replicas", f"{sets} hold different values of the same elements")
        if entry.is_tensor and entry.held:
            total = entry.total
            held = {number: block.numel for number, block in total.blocks.items()}
            short = [
                number
                for number in range(_count(entry.shape))
                if held.get(number, 0) < blocks.numel_of(number, entry.shape)
            ]
            if short:
                yield Difference(key, "held by none", f"{_rows(short, entry.shape)} are in no {_unit(state)}")
        if len(set(entry.values.values())) > 1 and entry.key.section != MODEL:
            told = ", ".join(f"{value} on {source}" for source, value in list(entry.values.items())[:4])
            yield Difference(key, "differs between ranks", told)


def _unit(state: State) -> str:
    return "rank" if state.is_live else "file"


def _sections_missing(a: State, sections: Collection[str]) -> Iterator[Difference]:
    for section in _SECTIONS:
        mine = [key for key in a.entries if key.section == section]
        if mine and section not in sections and section != SCHEDULER:
            yield Difference(Key(section, f"the {section}"), "missing", f"none of its {len(mine)} entries is there")


def _entry(entry: Entry, other: Entry | None, a: State, b: State, known: _Known) -> Iterator[Difference]:
    key = entry.key
    if entry.tied:
        first = a.entries[Key(MODEL, entry.tied)]
        if other is None:  # a file has one of tied parameters
            return
        if not other.tied and other.is_tensor and not b.is_live:
            entry = dataclasses.replace(first, key=key)
        elif not other.tied:
            yield Difference(key, "tie", f"is no longer one parameter with {entry.tied}")
            return
        else:
            return
    elif other is not None and other.tied and b.is_live:
        yield Difference(key, "tie", f"is one parameter with {other.tied} now")
        return
    if other is None:
        # A file may have the values under the name of a tied parameter.
        names = [one.key for one in a.entries.values() if one.tied == key.name and key.section == MODEL]
        if not any(name in b.entries for name in names):
            yield Difference(key, "missing", f"{_kind(entry)} that {b.path} does not have")
        return
    if other.tied and not other.held:
        other = dataclasses.replace(b.entries.get(Key(MODEL, other.tied), other), key=key)
    if entry.is_tensor and other.is_tensor:
        if (found := _tensors(entry, other, known)) is not None:
            yield found
    elif entry.is_tensor or other.is_tensor:
        yield from _mixed(entry, other)
    elif entry.values and other.values and (was := _value(entry)) != (now := _value(other)):
        yield Difference(key, "value", f"is {now} for {was}")
    if entry.trains is not None and other.trains is not None and entry.trains != other.trains:
        now = "trains" if other.trains else "is frozen"
        yield Difference(key, "requires_grad", f"{now} in {b.path}, and not in {a.path}")
    if b.is_live and a.is_live and entry.stepped_by != other.stepped_by and b.has_optimizer and a.has_optimizer:
        yield Difference(
            key, "optimizer", f"is in {other.stepped_by or 'no optimizer'} for {entry.stepped_by or 'no optimizer'}"
        )


def _mixed(entry: Entry, other: Entry) -> Iterator[Difference]:
    """Compare a number with a tensor of one element, as of a step counter."""
    numbers = [_number(one) for one in (entry, other)]
    if None in numbers:
        yield Difference(entry.key, "kind", f"is {_kind(other)} for {_kind(entry)}")
    elif not math.isclose(numbers[0] or 0.0, numbers[1] or 0.0, rel_tol=1e-6):
        yield Difference(entry.key, "value", f"is {numbers[1]:g} for {numbers[0]:g}")


def _number(entry: Entry) -> float | None:
    """Return the number that an entry is; of a tensor of one element its size, as digests have it."""
    if entry.is_tensor:
        return _size(entry.total) if entry.numel == 1 else None
    try:
        return abs(float(json.loads(_value(entry))))
    except (TypeError, ValueError):
        return None


def _value(entry: Entry) -> str:
    return next(iter(entry.values.values()))


def _kind(entry: Entry) -> str:
    if not entry.is_tensor:
        return "a value"
    return {"": "an entry", "state": "a state"}.get(entry.kind, f"a {entry.kind}")


# Tensors -------------------------------------------------------------------------------------------


def _tensors(entry: Entry, other: Entry, known: _Known) -> Difference | None:
    """Return what differs between two tensors, or None if they are equal."""
    if entry.shape != other.shape:
        return Difference(entry.key, *_shapes(entry, other))
    mine, its = entry.total, other.total
    if entry.dtype != other.dtype:
        return _dtypes(entry, other, mine, its)
    wrong = [n for n in range(_count(entry.shape)) if _hash(mine, n) != _hash(its, n)]
    if not wrong:
        return None
    if entry.numel == 1:
        return Difference(entry.key, "value", f"is {_size(its):g} for {_size(mine):g}")
    if (same := _known_elsewhere(entry, its, known) or _by_values(entry, other)) is not None:
        return Difference(entry.key, *same)
    texts = [*_zeros(entry, mine, its, wrong), *_moved(entry, mine, its, wrong)]
    if texts:
        return Difference(entry.key, texts[0][0], "; ".join(text for _, text in texts))
    return _by_distance(entry, mine, its, wrong)


def _size(sums: Sums) -> float:
    """Return the size of the number that a tensor of one element is: digests have no sign."""
    return math.sqrt(sums.squares)


def _known_elsewhere(entry: Entry, its: Sums, known: _Known) -> tuple[str, str] | None:
    """Tell a tensor of an earlier state, and that of another entry."""
    hashes = _hashes(its)
    for state in known.earlier:
        old = state.entries.get(entry.key)
        if old is not None and old.shape == entry.shape and _hashes(old.total) == hashes:
            return "stale", f"is that of {state.path}" + ("" if state.step is None else f", after step {state.step}")
    if any(block.squares for block in its.blocks.values()):
        for key in known.entries.get(hashes, ()):
            if key != entry.key and key.section == entry.key.section:
                return "another's", f"has the values of {key}"
    return None


def _zeros(entry: Entry, mine: Sums, its: Sums, wrong: list[int]) -> Iterator[tuple[str, str]]:
    zeros = [n for n in wrong if _squares(its, n) == 0 and _squares(mine, n) > 0]
    if zeros:
        all_of_it = len(zeros) == _count(entry.shape)
        yield "zeros", "is all zeros" if all_of_it else f"{_rows(zeros, entry.shape)}{_whose(entry, zeros)} are zeros"
        wrong[:] = [n for n in wrong if n not in zeros]


def _moved(entry: Entry, mine: Sums, its: Sums, wrong: list[int]) -> Iterator[tuple[str, str]]:
    """Tell blocks that have the values of other blocks: exchanged, or repeated."""
    places: dict[int, int] = {}
    for n in range(_count(entry.shape)):
        if _squares(mine, n) > 0:
            places.setdefault(_hash(mine, n) or 0, n)
    moved = {n: places[_hash(its, n) or 0] for n in wrong if (_hash(its, n) or 0) in places}
    swapped = {n: m for n, m in moved.items() if moved.get(m) == n}
    for first, second in _runs({n: m for n, m in swapped.items() if n < m}):
        one, other = _rows(first, entry.shape), _rows(second, entry.shape)
        yield "exchanged", f"{one} and {other} are exchanged"
    for first, second in _runs({n: m for n, m in moved.items() if n not in swapped}):
        text = f"{_rows(first, entry.shape)}{_whose(entry, first)} have the values of {_rows(second, entry.shape)}"
        yield "repeated", text + _whose(entry, second)
    wrong[:] = [n for n in wrong if n not in moved]


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
    where = "" if len(wrong) == _count(entry.shape) else f" in {_rows(wrong, entry.shape)}{_whose(entry, wrong)}"
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
        for n in range(_count(entry.shape))
        if not math.isclose(_squares(mine, n), _squares(its, n), rel_tol=8 * rounding, abs_tol=1e-300)
    ]
    where = f", most in {_rows(wrong, entry.shape)}" if 0 < len(wrong) < _count(entry.shape) else ""
    return Difference(entry.key, "values", f"{said}, and differs by more than its rounding{where}", distance)


def _shapes(entry: Entry, other: Entry) -> tuple[str, str]:
    """Tell what a tensor of another shape is."""
    said = f"has the shape {list(other.shape)} for {list(entry.shape)}"
    if other.numel == 0:
        return "empty", f"is an empty entry: {said}"
    if other.load is None:
        return "shape", said
    tensor = other.load()
    if len(entry.shape) == 2 and other.shape == entry.shape[::-1] and _is(entry, tensor.t()):
        return "transposed", f"is transposed: {said}"
    for one in entry.held:
        if not one.box.is_full and tensor.numel() == one.box.numel:
            (its,) = blocks.sums([tensor.reshape(-1) if one.box.flat else tensor.reshape(_local(one.box))], [one.box])
            if _hashes(its) == _hashes(one.sums):
                return "a shard", f"has the shard of {one.source} alone: {said}"
    if tensor.numel() > entry.numel and entry.numel:
        if other.shape[1:] == entry.shape[1:] and _is(entry, tensor[: entry.shape[0]]):
            return "padding", f"has {other.shape[0] - entry.shape[0]} rows of padding: {said}"
        if _is(entry, tensor.reshape(-1)[: entry.numel].reshape(entry.shape)):
            return "padding", f"is flat, with {tensor.numel() - entry.numel} elements of padding: {said}"
    elif tensor.numel() == entry.numel and _is(entry, tensor.reshape(entry.shape)):
        return "shape", f"{said}, with the same values"
    return "shape", said


def _local(box: Box) -> tuple[int, ...]:
    dims = box.dims or tuple(((0, size),) for size in box.shape)
    return tuple(sum(stop - start for start, stop in spans) for spans in dims)


def _is(entry: Entry, tensor: torch.Tensor) -> bool:
    """Whether a tensor of a file has the values of an entry."""
    if tuple(tensor.shape) != entry.shape or str(tensor.dtype).removeprefix("torch.") != entry.dtype:
        return False
    (its,) = blocks.sums([tensor], [Box(entry.shape)])
    return _hashes(its) == _hashes(entry.total)


def _hashes(sums: Sums) -> tuple[int, ...]:
    return tuple(part for number, block in sorted(sums.blocks.items()) for part in (number, block.hash, block.numel))


def _hash(sums: Sums, number: int) -> int | None:
    found = sums.blocks.get(number)
    return None if found is None else found.hash


def _squares(sums: Sums, number: int) -> float:
    found = sums.blocks.get(number)
    return 0.0 if found is None else found.squares


def _count(shape: Sequence[int]) -> int:
    """Return the number of blocks of a tensor."""
    if not math.prod(shape):
        return 0
    return -(-shape[0] // blocks.rows_of_block(shape)) if shape else 1


def _eps(dtype: str) -> float:
    kind: Any = getattr(torch, dtype, None)
    return float(torch.finfo(kind).eps) if isinstance(kind, torch.dtype) and kind.is_floating_point else 0.0


def _rows(numbers: Sequence[int], shape: Sequence[int]) -> str:
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


def _sources(sources: Sequence[str]) -> str:
    return ", ".join(sources[:4]) + (f" and {len(sources) - 4} more" if len(sources) > 4 else "")


# Printing ------------------------------------------------------------------------------------------


def lines(differences: Sequence[Difference]) -> Iterator[str]:
    """Yield a line for each thing that is said, with the entries of which it is said."""
    together: dict[tuple[str, str, str], list[Difference]] = {}
    for one in differences:
        together.setdefault((one.key.section, one.kind, one.text if one.kind != "values" else ""), []).append(one)
    for (section, _, text), some in together.items():
        some.sort(key=lambda one: -one.distance)
        if text:
            names = ", ".join(str(one.key) for one in some[:_NAMES])
        else:
            names = "; ".join(f"{one.key} {one.text}, by {one.distance:.1e} of its norm" for one in some[:_NAMES])
        more = f" and {len(some) - _NAMES} more" if len(some) > _NAMES else ""
        least = some[-1].distance
        if text:
            cost = f", which cost at most {some[0].distance:.1e} of a norm" if some[0].distance else ""
            yield f"{section}: {names}{more}: {text}{cost}"
        else:
            yield f"{section}: {names}{more and f';{more}, by {least:.1e} or more'}"
