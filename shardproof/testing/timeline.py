"""What ran on a device, and when: the kernels of collectives and of busy layers, from torch's profiler."""

import dataclasses
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from shardproof.harness.collectives.trace import Collective, Trace

#: A word in the names of NCCL's kernels, by the trace's kind of collective.
_KERNELS = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce"}
#: A word in the name of the kernel that occupies a stream.
_BUSY = "spin_kernel"


@dataclasses.dataclass(frozen=True)
class Interval:
    """When one kernel ran, in microseconds of the profiler's clock."""

    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Moved(Interval):
    """When the kernel of one collective of the trace ran."""

    collective: Collective


class Timeline:
    """The kernels of one training step, which ``step`` runs.

    Attributes:
        busy: when layers occupied the stream, in the order of time.
        moved: when collectives ran, by kind; of each kind in the order of the trace.

    Raises:
        AssertionError: the profiler has another number of kernels of a kind than the trace has collectives.
    """

    def __init__(self, step: Callable[[], object], trace: Trace) -> None:
        before = len(trace)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        issued = trace[before:]
        kernels = sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in profiler.events() or ()
            if event.device_type.name == "CUDA"
        )
        self.busy = [Interval(start, end) for start, end, name in kernels if _BUSY in name]
        self.moved: dict[str, list[Moved]] = {}
        for kind, word in _KERNELS.items():
            found = [(start, end) for start, end, name in kernels if "nccl" in name.lower() and word in name]
            expected = [item for item in issued if item.kind == kind]
            assert len(found) == len(expected), (
                f"the profiler saw {len(found)} kernels of {kind} and the trace has {len(expected)}; "
                f"kernels: {sorted({name for *_, name in kernels})}"
            )
            self.moved[kind] = [Moved(start, end, item) for (start, end), item in zip(found, expected, strict=True)]
