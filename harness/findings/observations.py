"""What a rank observes during a case besides its verdict: losses, distances, traces, expected texts.

Built from plain types and the enums of this room alone, because it travels to the controller and into the run file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from shardproof.harness.findings.stages import Stage


@dataclasses.dataclass(frozen=True)
class ExpectedText:
    """One inline expected text, as a rank found it; the controller compares and accepts it.

    Attributes:
        text: what the case rendered.
        expected: the literal at the call.
        filename: the file of the call.
        lineno: the line of the call.
    """

    text: str
    expected: str
    filename: str
    lineno: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """The distance of one tensor to the oracle, in ulps, for the run file."""

    stage: Stage
    step: int
    name: str
    sharded_ulps: float
    baseline_ulps: float
    allowed_ulps: float

    @property
    def used(self) -> float:
        """The part of the allowed distance that the sharded run used; above 1 it is a failure."""
        return self.sharded_ulps / self.allowed_ulps

    def as_record(self) -> dict[str, Any]:
        """The distance as the run file holds it."""
        return dataclasses.asdict(self) | {"stage": self.stage.value}


@dataclasses.dataclass
class Observations:
    """What one rank collected; the controller merges those of all ranks."""

    losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    distances: dict[tuple[int, Stage], Measured] = dataclasses.field(default_factory=dict)
    trace: list[str] = dataclasses.field(default_factory=list)
    expected_texts: list[ExpectedText] = dataclasses.field(default_factory=list)

    def add_losses(self, **by_run: float) -> None:
        """Add one step: this rank's loss in each run, summed over microbatches."""
        for name, value in by_run.items():
            self.losses.setdefault(name, []).append(value)

    def add_distances(self, measured: Iterable[Measured]) -> None:
        """Keep the distance of each stage and step that used most of what is allowed."""
        keep_worst(self.distances, measured)

    def add_trace(self, lines: Iterable[str]) -> None:
        """Append the collectives of one run of the implementation, one line each."""
        self.trace.extend(lines)

    def add_expected_text(self, text: ExpectedText) -> None:
        """Have the controller compare a text with its inline literal."""
        self.expected_texts.append(text)


def keep_worst(distances: dict[tuple[int, Stage], Measured], measured: Iterable[Measured]) -> None:
    """Merge ``measured`` into ``distances``: for each step and stage, the one that used most of what is allowed."""
    for item in measured:
        known = distances.get((item.step, item.stage))
        if known is None or item.used > known.used:
            distances[item.step, item.stage] = item
