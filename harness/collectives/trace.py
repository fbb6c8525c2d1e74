"""The ordered trace of one rank's collectives, and how traces differ."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from shardproof.harness.findings.finding import Finding, Location
from shardproof.harness.findings.stages import Stage


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective as one rank issued it.

    ``nbytes`` is what the whole group gathers, reduces or moves: the output of an all-gather,
    the input of anything else. ``group`` lists global ranks. ``unit`` is the unit whose
    parameters have that many bytes, "a|b" where several have, "" where none has.
    """

    phase: str
    kind: str
    dtype: str
    nbytes: int
    group: tuple[int, ...]
    unit: str = ""

    def __str__(self) -> str:
        ranks = f"{self.group[0]}-{self.group[-1]}" if _is_range(self.group) else ",".join(map(str, self.group))
        unit = f"  {self.unit}" if self.unit else ""
        return f"{self.phase:<8}  {self.kind:<14}  {self.dtype:<8}  {self.nbytes:>6} B  ranks {ranks}{unit}"


class Trace(list[Collective]):
    """Collectives in the order in which a rank issued them."""

    def render(self) -> str:
        """One line a collective, with the phase, kind, dtype, bytes, group and unit."""
        return "".join(f"{collective}\n" for collective in self)

    def counts(self, phase: str) -> dict[str, int]:
        """How many of each kind the phase issued; kinds that it did not issue are absent."""
        return dict(collections.Counter(item.kind for item in self if item.phase == phase))


def first_difference(traces: Sequence[Trace]) -> Finding | None:
    """The first place where the members of a group issued different collectives on it.

    Args:
        traces: one of each rank, in the order of global ranks.

    Returns:
        A finding that names the first differing rank, or None where all members of each group issued the same sequence.
    """
    groups = sorted({item.group for trace in traces for item in trace})
    for group in groups:
        sequences = {rank: [item for item in traces[rank] if item.group == group] for rank in group}
        first = sequences[group[0]]
        for rank, sequence in sequences.items():
            for position in range(max(len(first), len(sequence))):
                ours, theirs = (_at(items, position) for items in (first, sequence))
                if ours != theirs:
                    text = (
                        f"collective {position} on ranks {squeeze(str(list(group)))} differs: "
                        f"rank {group[0]} issued [{ours}], rank {rank} issued [{theirs}]"
                    )
                    return Finding(Location(stage=Stage.COLLECTIVES, rank=rank), text)
    return None


def _at(items: Sequence[Collective], position: int) -> str:
    return squeeze(str(items[position])) if position < len(items) else "nothing more"


def count_difference(trace: Trace, phase: str, expected: dict[str, int]) -> Finding | None:
    """How the number of collectives in a phase differs from the expected one.

    Args:
        trace: of one rank.
        phase: "forward", "backward", "clip" or "step".
        expected: the number of each kind; a kind that is absent is expected not at all.

    Returns:
        A finding about the first kind, by name, whose number differs, or None. It names the unit that has more than one
        of them, if one has.
    """
    counts = trace.counts(phase)
    for kind in sorted(counts.keys() | expected.keys()):
        found, wanted = counts.get(kind, 0), expected.get(kind, 0)
        if found != wanted:
            items = [item for item in trace if item.phase == phase and item.kind == kind]
            per_unit = collections.Counter(item.unit or f"{item.nbytes} B" for item in items)
            listed = ", ".join(f"{unit} {count}" for unit, count in per_unit.items())
            unit, most = per_unit.most_common(1)[0] if per_unit else ("", 0)
            location = Location(stage=Stage.COLLECTIVES, phase=phase, name=unit if most > 1 else None)
            return Finding(location, f"{found} {kind} instead of {wanted} in {phase}: {listed or 'none'}")
    return None


def _is_range(ranks: tuple[int, ...]) -> bool:
    return len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1))


def squeeze(line: str) -> str:
    """The line with runs of spaces made one space."""
    return " ".join(line.split())
