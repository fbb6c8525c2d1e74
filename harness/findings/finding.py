"""A failed comparison, where it failed, and the exception that reports it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from shardproof.harness.findings.stages import Stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Location:
    """Where two runs diverge. Everything but the stage may be unknown.

    Attributes:
        stage: the point of the training step.
        phase: for ``Stage.COLLECTIVES``, the phase of the step: "forward", "backward", "clip" or "step".
        step: the training step, counted from 0.
        rank: the global rank.
        name: the parameter's or the unit's name.
        element: the index into the full, unsharded tensor.
    """

    stage: Stage
    phase: str | None = None
    step: int | None = None
    rank: int | None = None
    name: str | None = None
    element: tuple[int, ...] | None = None

    @property
    def stage_label(self) -> str:
        """The stage's name, with the phase if there is one: "collectives in forward"."""
        return f"{self.stage.value} in {self.phase}" if self.phase else self.stage.value

    def as_record(self) -> dict[str, Any]:
        """Return the location as the run file stores it."""
        return {
            "stage": self.stage_label, "step": self.step, "rank": self.rank, "name": self.name, "element": self.element,
        }  # fmt: skip

    def __str__(self) -> str:
        parts = [self.stage_label]
        parts += [f"of {self.name!r}"] if self.name else []
        parts += [f"at step {self.step}"] if self.step is not None else []
        parts += [f"on rank {self.rank}"] if self.rank is not None else []
        parts += [f"element {list(self.element)}"] if self.element is not None else []
        return " ".join(parts)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One comparison that failed on one rank.

    Attributes:
        location: where the two sides of the comparison differ.
        text: the numbers that differ, and a guess at the cause where there is one; may have several lines.
    """

    location: Location
    text: str

    def render(self, *, title: str, also: Sequence[int] = ()) -> str:
        """Return the message of the failure.

        Args:
            title: what went wrong, for example "the sharded run diverges from the baseline".
            also: other ranks that have a finding at the same stage.

        Returns:
            Lines with the title and the location, the finding's own text, and the other ranks; no newline at the end.
        """
        lines = [f"{title}: {self.location}", f"  {self.text}"]
        if also:
            lines.append(
                f"  the same stage diverges on rank{'s' * (len(also) > 1)} {', '.join(map(str, also))} as well"
            )
        return "\n".join(lines)


class Divergence(AssertionError):
    """The sharded run differs from what it is compared with; all ranks of the world raise it together.

    Because all ranks raise it at the same place, no rank is left in a collective, and the world can run the next case.

    Args:
        text: the message of the failure.
        location: where the runs differ.
    """

    def __init__(self, text: str, location: Location) -> None:
        super().__init__(text)
        self.location = location
