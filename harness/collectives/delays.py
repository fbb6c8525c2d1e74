"""Delays at chosen collectives, after the forward or around the optimizer step, on chosen ranks.

On a GPU a delay is work on the stream that issues the collective, so that a missing wait produces a wrong number. On
the CPU the rank sleeps, so that a missing order produces a wrong trace. Delays are injected at a collective's operator
and not at the Python function that issues it, because torch 2.13 renamed those functions and DDP's reducer calls none.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

from shardproof.harness.collectives.recorder import KINDS, Recorder
from shardproof.harness.collectives.trace import Collective
from shardproof.harness.tensors.devices import occupy

_WHEN = ("before", "after")
_POINTS = ("collective", "loss", "step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delay:
    """A delay at every matching point of a run.

    Attributes:
        milliseconds: the duration; positive.
        when: whether to wait before or after the collective or step; the gap ("loss") has no end to wait after.
        collective: the kind of collective, in the trace's vocabulary; None matches every kind.
        phase: the phase of the step in which the collective is issued; None matches every phase.
        at: delay collectives, the gap between forward and backward ("loss"), or the optimizer step ("step").
            ``collective`` and ``phase`` apply to "collective" only.
        ranks: the global ranks that wait; None means all.

    Raises:
        ValueError: ``milliseconds`` is not a positive number, or no point of any run can match.
    """

    milliseconds: float
    when: Literal["before", "after"] = "before"
    collective: str | None = None
    phase: str | None = None
    at: Literal["collective", "loss", "step"] = "collective"
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.milliseconds < math.inf:
            raise ValueError(f"Delay(milliseconds={self.milliseconds!r}): expected a positive number")
        for name, known in (("when", _WHEN), ("at", _POINTS), ("collective", (None, *KINDS))):
            if (value := getattr(self, name)) not in known:
                choices = ", ".join(map(repr, known))
                raise ValueError(f"Delay({name}={value!r}) can never be met; expected one of {choices}")
        if self.at != "collective" and (self.collective or self.phase):
            raise ValueError(f"Delay(at={self.at!r}): collective and phase apply to at='collective' only")
        if self.at == "loss" and self.when == "after":
            raise ValueError("Delay(at='loss', when='after') can never be met; use when='before', or at='step'")
        if self.ranks is not None and not self.ranks:
            raise ValueError("Delay(ranks=()) delays no rank; use None for all ranks")

    def matches(self, collective: Collective) -> bool:
        """Whether this delay applies to ``collective``."""
        return (
            self.at == "collective"
            and self.collective in (None, collective.kind)
            and self.phase in (None, collective.phase)
        )


class Perturbation:
    """Injects the delays of one run on one rank.

    Attributes:
        met: for each delay, how many points of the run matched it, whether or not this rank waits there. A delay with a
            count of 0 had no effect.
    """

    def __init__(self, delays: Sequence[Delay], *, rank: int, device_type: str) -> None:
        self.met: dict[Delay, int] = dict.fromkeys(delays, 0)
        self._rank = rank
        self._device_type = device_type

    def install(self, recorder: Recorder) -> None:
        """Delay the collectives that ``recorder`` records."""
        recorder.before = functools.partial(self.around, "before")
        recorder.after = functools.partial(self.around, "after")

    def at(self, point: Literal["loss", "step"], when: Literal["before", "after"] = "before") -> None:
        """Apply the delays of a point; the run calls this when the loss is ready and around the optimizer step."""
        for delay in self.met:
            if delay.at == point and delay.when == when:
                self._meet(delay)

    def assert_met(self) -> None:
        """Check that every delay matched at least one point of the run: one that matched nothing had no effect."""
        for delay, count in self.met.items():
            assert count, f"{delay} matched nothing in this run, so it had no effect"

    def around(self, when: Literal["before", "after"], collective: Collective) -> None:
        """Apply the delays of a collective; without a recorder, the run calls this before each."""
        for delay in self.met:
            if delay.when == when and delay.matches(collective):
                self._meet(delay)

    def _meet(self, delay: Delay) -> None:
        self.met[delay] += 1
        if delay.ranks is None or self._rank in delay.ranks:
            occupy(delay.milliseconds, device_type=self._device_type)
