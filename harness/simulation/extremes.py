"""The most that a rank holds in each part of a step: of all kinds together, and of each kind by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from shardproof.harness.simulation.memory import Kind, Ledger


@dataclasses.dataclass
class Extreme:
    """The most bytes in one part of a step.

    Attributes:
        at_peak: the bytes of each kind at the first moment at which most bytes were held.
        most: the most bytes of each kind, each at its own moment.
    """

    at_peak: dict[Kind, int]
    most: dict[Kind, int]

    def note(self, held: Mapping[Kind, int]) -> None:
        """Count what is held at one moment."""
        if sum(held.values()) > sum(self.at_peak.values()):
            self.at_peak = dict(held)
        for kind, nbytes in held.items():
            self.most[kind] = max(self.most[kind], nbytes)


def extremes(ledger: Ledger, *, step: int, parts: Sequence[Sequence[str]]) -> list[Extreme]:
    """Return the extremes of each part of the last step.

    Args:
        ledger: what counted it.
        step: the number of the step, after which nothing was counted yet.
        parts: the phases of each part, in the order of the step. What is held when a part begins counts in it, also if
            nothing is allocated or freed in the part.
    """
    held = dict.fromkeys(Kind, 0)
    part_of = {phase: index for index, phases in enumerate(parts) for phase in phases}
    found: list[Extreme] = []

    def begin(until: int) -> None:
        while len(found) <= until:
            found.append(Extreme(dict(held), dict(held)))

    for change in ledger._changes:
        index = part_of.get(change.phase) if change.step == step else None
        if index is not None:
            begin(index)
        held[change.block.kind] += change.delta
        if index is not None:
            found[index].note(held)
    begin(len(parts) - 1)
    return found
