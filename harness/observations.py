"""What a rank observed during a case besides its verdict: losses, distances, traces, expected texts.

Plain built-in types only, because it travels to the controller and into the run file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.compare import Measured


@dataclasses.dataclass(frozen=True)
class Expectation:
    """One inline expected text: compared, and accepted, in the controller."""

    text: str
    expected: str
    filename: str
    lineno: int


@dataclasses.dataclass
class Observations:
    """Collected on one rank; the controller merges those of all ranks."""

    losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    distances: dict[tuple[str, int], dict[str, Any]] = dataclasses.field(default_factory=dict)
    trace: list[str] = dataclasses.field(default_factory=list)
    expectations: list[Expectation] = dataclasses.field(default_factory=list)

    def add_losses(self, **by_run: float) -> None:
        """One step: this rank's loss, summed over microbatches, in each run."""
        for name, value in by_run.items():
            self.losses.setdefault(name, []).append(value)

    def add_distances(self, measured: Iterable[Measured]) -> None:
        """Keep the worst of each stage and step: the one nearest to, or furthest over, what is allowed."""
        for item in measured:
            ratio = item.distance.sharded_ulps / item.distance.allowed_ulps
            known = self.distances.get((item.stage, item.step))
            if known is None or ratio > known["sharded_ulps"] / known["allowed_ulps"]:
                self.distances[item.stage, item.step] = {
                    "stage": item.stage,
                    "step": item.step,
                    "name": item.name,
                    "sharded_ulps": item.distance.sharded_ulps,
                    "baseline_ulps": item.distance.baseline_ulps,
                    "allowed_ulps": item.distance.allowed_ulps,
                }

    def add_trace(self, lines: Iterable[str]) -> None:
        """Append the collectives of one run of the implementation."""
        self.trace.extend(lines)

    def add_expectation(self, text: str, expected: str, filename: str, lineno: int) -> None:
        """Have the controller compare a text with its inline literal."""
        self.expectations.append(Expectation(text, expected, filename, lineno))
