"""The ordered trace of one rank's collectives, and the comparison of traces."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

from shardproof.harness.judging.finding import Finding, Location, Stage


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective as one rank issued it."""

    phase: str  # the phase of the step, for example "forward", "backward", "clip" or "step"
    kind: str  # for example "all_gather"
    dtype: str  # without its "torch." prefix
    nbytes: int  # what the whole group gathers, reduces or moves: the output of a gather, the input of anything else
    group: tuple[int, ...]  # global ranks
    # The label of the unit whose parameters have that many bytes; "a|b" where several units do, "" where none does.
    unit: str = ""
    # The operator of a reduction, "sum"; empty of other kinds and where it is not known. It makes no other collective.
    operator: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        ranks = f"{self.group[0]}-{self.group[-1]}" if _is_range(self.group) else ",".join(map(str, self.group))
        unit = f"  {self.unit}" if self.unit else ""
        return f"{self.phase:<8}  {self.kind:<14}  {self.dtype:<8}  {self.nbytes:>6} B  ranks {ranks}{unit}"


class Trace(list[Collective]):
    """The collectives of one rank, in the order in which it issued them."""

    def render(self) -> str:
        """Format the trace, one line for each collective with its phase, kind, dtype, bytes, group and unit."""
        return "".join(f"{collective}\n" for collective in self)

    def counts(self, phase: str) -> dict[str, int]:
        """Count the collectives of a phase by kind; kinds that were not issued are absent."""
        return dict(collections.Counter(item.kind for item in self if item.phase == phase))


def gathered_in(trace: Sequence[Collective], phase: str = "forward") -> list[str]:
    """Return the units that are gathered in a phase, in order, each once."""
    found = (item.unit for item in trace if (item.phase, item.kind) == (phase, "all_gather"))
    return [unit for unit in dict.fromkeys(found) if unit]


def first_difference(traces: Sequence[Trace]) -> Finding | None:
    """Find the first collective that differs between the members of a group, in the traces of all ranks in their order.

    The finding names the first rank that differs from its group's first member. The bytes of an all_to_all may differ.
    """
    groups = sorted({item.group for trace in traces for item in trace})
    for group in groups:
        sequences = {rank: [squeeze(str(item)) for item in traces[rank] if item.group == group] for rank in group}
        if found := _difference_on(squeeze(str(list(group))), sequences):
            rank, text = found
            return Finding(Location(stage=Stage.COLLECTIVES, rank=rank), text)
    return None


def rendered_difference(lines: Mapping[int, Sequence[str]]) -> str | None:
    """Find the first collective that differs between the members of a group, in traces that were sent as text.

    Takes the collectives by global rank, each as ``str(Collective)``. Sends and receives are left out, because their
    sides differ. The description names the group and both collectives.
    """
    for group, members in by_group(lines).items():
        if found := _difference_on(group, members):
            return found[1]
    return None


def by_group(lines: Mapping[int, Sequence[str]]) -> dict[str, dict[int, list[str]]]:
    """Sort what ranks issued, as for :func:`rendered_difference`, by the groups on which they did.

    By group, as a line names its ranks, and by member these are the squeezed lines without sends and receives; of
    members without a trace nothing.
    """
    found: dict[str, dict[int, list[str]]] = {}
    for rank, collectives in lines.items():
        for line in map(squeeze, collectives):
            ranks = _RANKS.search(line)
            if ranks and not {"send", "recv"} & set(line.split()):
                found.setdefault(ranks[1], {}).setdefault(rank, []).append(line)
    return {
        group: {rank: sequences.get(rank, []) for rank in _members(group) if rank in lines}
        for group, sequences in sorted(found.items())
    }


def _difference_on(group: str, sequences: Mapping[int, Sequence[str]]) -> tuple[int, str] | None:
    """Return the first rank whose sequence on a group differs from that of its first member, with a description.

    The sequences are squeezed lines, the first member's first.
    """
    member, first = next(iter(sequences.items()))
    for rank, own in sequences.items():
        for position, (ours, theirs) in enumerate(itertools.zip_longest(first, own, fillvalue="nothing more")):
            if without_own_bytes(ours) != without_own_bytes(theirs):
                return rank, (
                    f"collective {position} on ranks {group} differs: rank {member} issued [{ours}], "
                    f"rank {rank} issued [{theirs}]"
                )
    return None


_RANKS = re.compile(r" ranks ([\d,-]+)(?: |$)")


def _members(group: str) -> list[int]:
    """Return the ranks of a group as a line of a trace writes them: "0-3" or "0,2"."""
    first, dash, last = group.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else [int(rank) for rank in group.split(",")]


def without_own_bytes(line: str) -> str:
    """Drop from the description of a collective the bytes that may differ between ranks: those of an all_to_all."""
    return _BYTES.sub("", line) if "all_to_all" in line.split() else line


_BYTES = re.compile(r" \d+ B\b")


def count_difference(
    trace: Trace, phase: str, expected: dict[str, int], *, units: Sequence[str] = (), root: str = ""
) -> Finding | None:
    """Compare the number of collectives in a phase with the expected number of each kind, which may be 0.

    Args:
        units: the labels of the units, of which a missing collective is one's.
        root: the label among them of the root's own unit, which is kept after forward by default.

    Returns:
        A finding about the first kind, in alphabetical order, whose number differs, or None. The finding names the unit
        with the most collectives of that kind, if it has more than one, or the only unit whose collective is missing.
    """
    counts = trace.counts(phase)
    for kind in sorted(counts.keys() | expected.keys()):
        found, wanted = counts.get(kind, 0), expected.get(kind, 0)
        if found != wanted:
            items = [item for item in trace if item.phase == phase and item.kind == kind]
            per_unit = collections.Counter(item.unit or f"{item.nbytes} B" for item in items)
            listed = ", ".join(f"{unit} {count}" for unit, count in per_unit.items()) or "none"
            unit, most = per_unit.most_common(1)[0] if per_unit else ("", 0)
            name = unit if most > 1 else None
            per_unit_kind = kind in ("all_gather", "reduce_scatter")
            if per_unit_kind and found < wanted and (absent := _absent(items, wanted - found, units, root)):
                name = absent[0] if len(absent) == 1 else None
                listed += f"; none of {', '.join(absent)}{_NEVER_FREED.get((kind, phase), '')}"
            location = Location(stage=Stage.COLLECTIVES, phase=phase, name=name)
            return Finding(location, f"{found} {kind} instead of {wanted} in {phase}: {listed}")
    return None


#: Why a unit is not gathered.
_NEVER_FREED = {
    ("all_gather", "forward"): ", as when it was not resharded after the backward before",
    ("all_gather", "backward"): ", as when it was not resharded after forward",
}


def _absent(items: Sequence[Collective], missing: int, units: Sequence[str], root: str) -> list[str]:
    """Return the units that have none of the collectives, if they explain how many are missing.

    The root's own unit is left out if it may lack a collective by right and the others explain the number alone.
    """
    present = {label for item in items for label in item.unit.split("|")}
    absent = [unit for unit in units if unit not in present]
    choices = [absent, [unit for unit in absent if unit != root]]
    exact = [choice for choice in choices if len(choice) == missing]
    multiple = [choice for choice in choices if choice and missing % len(choice) == 0]
    return (exact or multiple or [[]])[0]


def _is_range(ranks: tuple[int, ...]) -> bool:
    return len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1))


def squeeze(line: str) -> str:
    """Collapse each run of whitespace in ``line`` to one space."""
    return " ".join(line.split())
