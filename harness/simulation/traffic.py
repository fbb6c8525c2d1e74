"""Sums of what one rank sends and receives, by group: which dimensions of the mesh a collective runs along."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from shardproof.harness.collectives.trace import Collective
from shardproof.harness.simulation.world import ranks_along


@dataclasses.dataclass(frozen=True)
class Shape:
    """A mesh of all ranks, by the sizes and names of its dimensions, and one rank's place on it.

    Attributes:
        sizes: the size of each dimension.
        names: the name of each dimension.
        rank: the global rank.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    rank: int

    def along(self, *names: str) -> tuple[int, ...]:
        """Return the ranks of this rank's group along the dimensions of these names, by the shape alone."""
        return ranks_along(self.rank, self.sizes, tuple(self.names.index(name) for name in names))

    def dimensions_of(self, group: tuple[int, ...]) -> str:
        """Return the names of the dimensions that a group runs along, joined by "+"; "" if it is none of the mesh.

        A group of one rank is along no dimension: "none".
        """
        if len(group) == 1:
            return "none"
        for count in range(1, len(self.names) + 1):
            for first in range(len(self.names) - count + 1):
                chosen = self.names[first : first + count]
                if self.along(*chosen) == tuple(sorted(group)):
                    return "+".join(chosen)
        if len(self.names) == 3 and self.along(self.names[0], self.names[2]) == tuple(sorted(group)):
            return f"{self.names[0]}+{self.names[2]}"
        return ""


@dataclasses.dataclass(frozen=True)
class Volume:
    """What collectives of one sort amount to.

    Attributes:
        count: the number of collectives.
        nbytes: the bytes that their groups gather, reduce or move, as in a trace.
        sent: the bytes that this rank sends with a ring, and receives as well: of a gather or a reduce-scatter over n
            ranks (n - 1) / n of its bytes, of an all-reduce twice that.
    """

    count: int
    nbytes: int
    sent: float

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.count + other.count, self.nbytes + other.nbytes, self.sent + other.sent)


def volume_of(item: Collective) -> Volume:
    """Return what one collective amounts to."""
    passes = {"all_reduce": 2, "broadcast": 1, "send": 1, "recv": 1}.get(item.kind, 1)
    share = (len(item.group) - 1) / len(item.group)
    return Volume(1, item.nbytes, passes * share * item.nbytes)


def by_group(trace: Iterable[Collective], shape: Shape) -> Mapping[tuple[str, str, str], Volume]:
    """Sum a trace by phase, kind and dimensions of the mesh, in the order of first occurrence.

    Args:
        trace: the collectives of one rank.
        shape: the mesh.

    Returns:
        From (phase, kind, dimensions) to the sum; the dimensions of a group that is none of the mesh's are its number
        of ranks, as "4 ranks".
    """
    found: dict[tuple[str, str, str], Volume] = collections.defaultdict(lambda: Volume(0, 0, 0.0))
    names: dict[tuple[int, ...], str] = {}
    for item in trace:
        if item.group not in names:
            names[item.group] = shape.dimensions_of(item.group) or f"{len(item.group)} ranks"
        found[item.phase, item.kind, names[item.group]] += volume_of(item)
    return dict(found)
