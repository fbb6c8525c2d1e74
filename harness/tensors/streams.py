"""Occupies the current stream of a device for a given time, without the host waiting."""

from __future__ import annotations

import functools
import itertools
import time

import torch

from shardproof.harness.tensors import private

#: The kernels that the clock is measured with, and the cycles of each: about half a millisecond.
_KERNELS = 20
_CYCLES = 1_000_000


def occupy(milliseconds: float, *, device_type: str) -> None:
    """Occupy the current stream of a CUDA device, and return at once; on the CPU, sleep."""
    if device_type == "cuda":
        # ``_sleep`` takes cycles of the SM clock and returns at once: it occupies the stream and not the host.
        private.need("torch.cuda._sleep")(int(milliseconds * _cycles_per_millisecond()))
    else:
        time.sleep(milliseconds / 1000)


@functools.cache
def _cycles_per_millisecond() -> float:
    """The rate of the device's clock: that of the fastest of several kernels in a row.

    Processes that share a GPU take turns of some milliseconds. A kernel during which others had their turn looks slow,
    and whatever is computed from it is too short, for as long as this process lives: layers that should have been busy
    for 20 ms were for less than 10. A kernel of half a millisecond mostly fits into a turn.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_KERNELS + 1)]
    events[0].record()
    for event in events[1:]:
        private.need("torch.cuda._sleep")(_CYCLES)
        event.record()
    events[-1].synchronize()
    shortest = min(float(before.elapsed_time(after)) for before, after in itertools.pairwise(events))
    return _CYCLES / shortest
