"""What a rank records during a case besides its verdict: losses, distances, traces and expected texts.

Only plain types and the enums of this room are used, because observations are sent to the pytest process and written to
the run file.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from shardproof.harness.judging.finding import Stage


@dataclasses.dataclass(frozen=True)
class ExpectedText:
    """A text that a rank rendered, its inline literal, and the call; the pytest process compares the two."""

    text: str
    expected: str
    filename: str
    lineno: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """The distance of one tensor to the oracle, for the run file: of both runs, and what the sharded one may have."""

    stage: Stage
    step: int
    name: str
    sharded_ulps: float
    baseline_ulps: float
    allowed_ulps: float

    @property
    def used(self) -> float:
        """The sharded run's distance as a fraction of the allowed distance; above 1 the comparison fails."""
        return self.sharded_ulps / self.allowed_ulps

    def as_record(self) -> dict[str, Any]:
        """Return the fields of the distance in the run file."""
        return dataclasses.asdict(self) | {"stage": self.stage.value}


@dataclasses.dataclass
class Observations:
    """What one rank recorded during a case; the pytest process merges the observations of all ranks."""

    # From the name of a run, such as "oracle", to its loss in each step.
    losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    # For each step and stage, the distance that used most of what is allowed.
    distances: dict[tuple[int, Stage], Measured] = dataclasses.field(default_factory=dict)
    # The collectives of the implementation's runs, one line each.
    trace: list[str] = dataclasses.field(default_factory=list)
    compares_collectives: bool = True  # whether the members of a group must have issued the same collectives on it
    expected_texts: list[ExpectedText] = dataclasses.field(default_factory=list)  # in the order of the calls
    spent: dict[str, float] = dataclasses.field(default_factory=dict)  # the seconds of each activity of the rank
    # The most bytes that a step of the implementation held at a time, beyond those before it. Where the device does not
    # count them: the most in a simulated world, or what the sharded parameters hold; None where neither is measured.
    peak_bytes: int | None = None
    # Of a check of the user's own training, what the run file stores of it.
    own: dict[str, Any] | None = None

    def add_peak(self, nbytes: int) -> None:
        """Keep the highest peak of all steps: bytes beyond those held before the step."""
        self.peak_bytes = max(nbytes, self.peak_bytes or 0)

    def add_losses(self, **by_run: float) -> None:
        """Append the losses of one step, of this rank and summed over microbatches, by the name of a run."""
        for name, value in by_run.items():
            self.losses.setdefault(name, []).append(value)

    def add_distances(self, measured: Iterable[Measured]) -> None:
        """Keep, for each step and stage, the distance that used most of what is allowed."""
        keep_worst(self.distances, measured)

    def add_trace(self, lines: Iterable[str]) -> None:
        """Append the collectives of one run of the implementation, one line each."""
        self.trace.extend(lines)

    def add_expected_text(self, text: ExpectedText) -> None:
        """Add a text that the pytest process is to compare with its inline literal."""
        self.expected_texts.append(text)


def keep_worst(distances: dict[tuple[int, Stage], Measured], measured: Iterable[Measured]) -> None:
    """Merge distances into a table, by (step, stage), of those that used most of what is allowed."""
    for item in measured:
        known = distances.get((item.step, item.stage))
        if known is None or item.used > known.used:
            distances[item.step, item.stage] = item
