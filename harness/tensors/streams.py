"""Occupies the current stream of a device for a given time, without the host waiting."""

from __future__ import annotations

import functools
import time

import torch


def occupy(milliseconds: float, *, device_type: str) -> None:
    """Occupy the current stream for ``milliseconds``; on the CPU, sleep.

    Args:
        milliseconds: the duration; positive.
        device_type: "cuda" to enqueue the work and return at once.
    """
    if device_type == "cuda":
        # ``_sleep`` takes cycles of the SM clock and returns at once: it occupies the stream and not the host.
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
