"""Marks in a trace what is missing and what is extra: against the counts of a case, other units, or another rank.

A line that begins with "-" is missing, one that begins with "+" is extra, and the others are as expected.
"""

import collections
import difflib
from collections.abc import Iterator, Mapping, Sequence

from shardproof.harness.collectives.trace import Trace, by_group, squeeze, without_own_bytes

#: The collectives that are shown around each difference, and the most lines that are shown of one comparison.
_AROUND = 2
_MOST_LINES = 40

MISSING, EXTRA, SAME = "-", "+", " "


def marked_counts(trace: Trace, phase: str, expected: Mapping[str, int], units: Sequence[str]) -> list[str]:
    """Mark the collectives of a phase of a step against the number of each kind that a case expects, which may be 0.

    The unit of a collective shows which one is missing or extra, where one of the kind is expected of each unit;
    otherwise the last ones are extra, and a missing one has no unit.
    """
    lines = [f"collectives in {phase}, against the numbers that the case expects:"]
    left = collections.Counter(expected)
    per_unit: collections.Counter[tuple[str, str]] = collections.Counter()
    for item in (item for item in trace if item.phase == phase):
        allowed = _per_unit(expected.get(item.kind, 0), units)
        per_unit[item.kind, item.unit] += 1
        is_extra = left[item.kind] <= 0 if allowed is None else per_unit[item.kind, item.unit] > allowed
        left[item.kind] -= not is_extra
        lines.append(f"{EXTRA if is_extra else SAME} {squeeze(str(item))}")
    for kind, count in left.items():
        allowed = _per_unit(expected.get(kind, 0), units)
        absent = [unit for unit in units if allowed for _ in range(allowed - per_unit[kind, unit])]
        lines += [f"{MISSING} {phase} {kind} {unit}" for unit in absent]
        lines += [f"{MISSING} {phase} {kind}"] * (count - len(absent))
    return _bounded(lines)


def lacking_collectives(trace: Trace, unit: str, *, root: str) -> list[str]:
    """Return a line for each kind of collective that a unit lacks in a phase of a step, and most other units have.

    Units of one size cannot be told apart: a collective of the trace names all of them. Of them a line says how many
    collectives all of them have. The root's own unit may stay gathered from forward to backward.
    """
    found: dict[tuple[str, str], collections.Counter[str]] = {}
    for item in trace:
        if item.unit:
            found.setdefault((item.phase, item.kind), collections.Counter())[item.unit] += 1
    lines = []
    for (phase, kind), labels in found.items():
        alike = next((label for label in labels if unit in label.split("|")), "")
        size = len(alike.split("|"))
        if not alike and (unit, phase, kind) != (root, "backward", "all_gather"):
            others = {other for label in labels for other in label.split("|")}
            lines.append(f"{MISSING} {phase} {kind} {unit} (of other units: {', '.join(sorted(others))})")
        elif alike and labels[alike] % size:
            lines.append(f"{MISSING} {phase} {kind} of one of {alike}: {labels[alike]} of {size} units")
    return lines


def between_ranks(traces: Mapping[int, Sequence[str]]) -> list[str]:
    """Mark what the members of each group issued on it against what its first member did.

    Takes the collectives by global rank, each as ``str(Collective)``. Returns lines for each rank that differs from the
    first of a group.
    """
    lines: list[str] = []
    for group, sequences in by_group(traces).items():
        first, *others = sequences
        for rank in others:
            if found := [*_marked(sequences[first], sequences[rank])]:
                lines += [f"collectives of rank {rank} on ranks {group}, against those of rank {first}:", *found]
    return _bounded(lines)


def between_texts(found: Sequence[str], expected: Sequence[str]) -> list[str]:
    """Mark the differences between the lines of a trace and the expected ones."""
    marked = [*_marked([*map(squeeze, expected)], [*map(squeeze, found)])]
    return _bounded(["collectives, against the trace that the case expects:", *marked]) if marked else []


def _marked(expected: Sequence[str], found: Sequence[str]) -> Iterator[str]:
    keys = [[without_own_bytes(line) for line in lines] for lines in (expected, found)]
    # Without the heuristic that takes lines which are frequent for noise: in a trace they are what it consists of.
    for hunk in difflib.SequenceMatcher(a=keys[0], b=keys[1], autojunk=False).get_grouped_opcodes(_AROUND):
        for what, begin, end, from_, to in hunk:
            if what == "equal":
                yield from (f"{SAME} {line}" for line in expected[begin:end])
            else:
                yield from (f"{MISSING} {line}" for line in expected[begin:end])
                yield from (f"{EXTRA} {line}" for line in found[from_:to])


def _per_unit(count: int, units: Sequence[str]) -> int | None:
    """The number of each unit, where a number is one of all units together."""
    return count // len(units) if units and count and count % len(units) == 0 else None


def _bounded(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"  ... {more} more lines"] if more > 0 else lines
