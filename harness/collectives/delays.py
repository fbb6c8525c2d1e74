"""Delays before or after a chosen collective or optimizer step, on chosen ranks.

On a device the delay is work for the stream that issues the collective, so that a missing wait
becomes a wrong number; on the CPU the rank sleeps, so that a missing order becomes a wrong trace.
Collectives are met at their operator, below the Python name that issued them: torch renamed those
names in 2.13, and DDP's reducer has none.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Literal

import torch

from shardproof.harness.collectives.recorder import Recorder
from shardproof.harness.collectives.trace import Collective


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delay:
    """Wait ``milliseconds`` ``when`` (before or after) each matching collective or step.

    ``collective`` is a kind of the trace's vocabulary, None for every kind; ``step`` delays the
    optimizer step instead, and ``loss`` the gap between forward and backward. ``ranks`` None
    means all.
    """

    milliseconds: float
    when: Literal["before", "after"] = "before"
    collective: str | None = None
    phase: str | None = None
    at: Literal["collective", "loss", "step"] = "collective"
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.milliseconds <= 0:
            raise ValueError(f"Delay(milliseconds={self.milliseconds!r}): expected a positive number")
        if self.at != "collective" and (self.collective or self.phase):
            raise ValueError(f"Delay(at={self.at!r}): collective and phase choose collectives only")

    def matches(self, collective: Collective) -> bool:
        """Whether this delay is for that collective."""
        return (
            self.at == "collective"
            and self.collective in (None, collective.kind)
            and self.phase in (None, collective.phase)
        )


class Perturbation:
    """The delays of one run on one rank; counts how often each was met, so that none is vacuous."""

    def __init__(self, delays: Sequence[Delay], *, rank: int, device_type: str) -> None:
        self.met: dict[Delay, int] = dict.fromkeys(delays, 0)
        self._rank = rank
        self._device_type = device_type

    def install(self, recorder: Recorder) -> None:
        """Delay the collectives that ``recorder`` sees."""
        recorder.before = functools.partial(self._around, "before")
        recorder.after = functools.partial(self._around, "after")

    def at(self, point: Literal["loss", "step"], when: Literal["before", "after"] = "before") -> None:
        """Called by the run where the loss is ready, and around the optimizer step."""
        for delay in self.met:
            if delay.at == point and delay.when == when:
                self._meet(delay)

    def assert_met(self) -> None:
        """Every delay was met at least once; one that was not perturbed nothing."""
        for delay, count in self.met.items():
            assert count, f"{delay} was never met: it perturbed nothing"

    def _around(self, when: str, collective: Collective) -> None:
        for delay in self.met:
            if delay.when == when and delay.matches(collective):
                self._meet(delay)

    def _meet(self, delay: Delay) -> None:
        self.met[delay] += 1
        if delay.ranks is None or self._rank in delay.ranks:
            wait(delay.milliseconds, device_type=self._device_type)


def wait(milliseconds: float, *, device_type: str) -> None:
    """Occupy the current stream for that long; on the CPU, sleep."""
    if device_type == "cuda":
        # ``_sleep`` counts cycles of the SM clock and returns at once; the stream is busy, the host is not.
        torch.cuda._sleep(int(milliseconds * _cycles_per_millisecond()))
    else:
        time.sleep(milliseconds / 1000)


@functools.cache
def _cycles_per_millisecond() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    end.synchronize()
    return 10_000_000 / float(start.elapsed_time(end))
