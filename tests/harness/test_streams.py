"""How long a stream is occupied."""

from __future__ import annotations

import pytest
import torch

from shardproof.harness.tensors import streams


class Clock:
    """Stands for a device of 2,000 cycles a millisecond, whose every third kernel waits 7 ms for another process."""

    def __init__(self):
        self.now, self.kernels = 0.0, []

    def sleep(self, cycles):
        self.kernels.append(cycles)
        self.now += cycles / 2000 + (0.0 if len(self.kernels) % 3 else 7.0)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", clock.sleep)
    streams._cycles_per_millisecond.cache_clear()
    yield clock
    streams._cycles_per_millisecond.cache_clear()


def test_turns_of_other_processes_make_no_occupation_shorter(clock):
    streams.occupy(20, device_type="cuda")
    assert clock.kernels[-1] == 40_000


def test_the_clock_is_measured_once(clock):
    streams.occupy(20, device_type="cuda")
    measured = len(clock.kernels) - 1
    streams.occupy(5, device_type="cuda")
    assert clock.kernels[measured:] == [40_000, 10_000]
