"""The one place that knows device types: which accelerator is here, its process groups, its memory and its streams.

Everywhere else a device is the CPU or an accelerator. What torch has for every type is called where it is needed
(``torch.accelerator``); what only the module of a type has, such as ``torch.cuda`` or ``torch.xpu``, is asked for here.
"""

from __future__ import annotations

import functools
import itertools
import re
import time
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardproof.harness.tensors import private

#: The device types and backends that an entry of known failures may name, on hosts that lack them too. A run takes
#: whatever torch reports, and its backend is the one that is registered for the type.
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "hpu": "hccl", "npu": "hccl", "xpu": "xccl"}

#: The name of the device type of the dispatch key PrivateUse1.
_OPEN_KEY = "torch._C._get_privateuse1_backend_name"

_NO_KERNEL = re.compile(r"Could not run '(\w+::[\w.]+)' with arguments|(\w+_overrideable) not implemented")

#: The kernels that the clock is measured with, and the cycles of each: about half a millisecond.
_KERNELS = 20
_CYCLES = 1_000_000


def accelerator() -> str:
    """The type of the accelerator that ranks can use here, or "". It has process groups; MPS has no float64."""
    found = torch.accelerator.current_accelerator(check_available=True)
    usable = dist.Backend.default_device_backend_map.keys() - {"mps"}
    return found.type if found is not None and found.type in usable else ""


def count() -> int:
    """The number of its devices on this host."""
    return torch.accelerator.device_count() if accelerator() else 0


def properties() -> list[tuple[str, int]]:
    """The name and the bytes of memory of each of its devices: the type and 0 where its module does not say."""
    kind = accelerator()
    ask = getattr(torch.get_device_module(kind), "get_device_properties", lambda _: None)
    found = map(ask, range(count()))
    return [(getattr(one, "name", kind), getattr(one, "total_memory", 0)) for one in found]


def missing_kernel(error: BaseException, device: torch.device) -> str:
    """Why a case cannot run on a device of torch's open key, if that has no kernel of an operator; or "".

    On other devices a missing kernel is a fault of torch's or of the caller's.
    """
    if not isinstance(error, NotImplementedError) or device.type != private.need(_OPEN_KEY)():
        return ""
    found = _NO_KERNEL.match(str(error))
    return f"the device {device.type} has no kernel of {found[1] or found[2]}" if found else ""


def check(asked: str) -> None:
    """Refuse a value of ``--device`` that this host does not have, by a ValueError of one line."""
    here = accelerator()
    if asked not in ("auto", "cpu", here or "auto"):
        has = f"the accelerator here is {here}; use {here}," if here else "torch finds no accelerator here; use"
        if (kind := asked.partition(":")[0]) != asked:
            has = f"a type has no number, each rank has a device of its own; use {kind},"
        elif not _is_type(asked):
            has = f"torch has no device type of this name, as it has cuda or xpu; {has}"
        raise ValueError(f"--device {asked}: {has} cpu or auto")


def _is_type(name: str) -> bool:
    """Whether torch knows a device type of this name, also one that this host lacks."""
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


def nccl_version() -> str:
    """The version of NCCL, of a torch that has it."""
    return ".".join(map(str, torch.cuda.nccl.version()))


def counts_memory(device: torch.device) -> bool:
    """Whether the allocator of the device counts the bytes that are requested, and the most at once."""
    return "requested_bytes.all.peak" in _memory_stats(device)


def _memory_stats(device: torch.device) -> dict[str, int]:
    found: dict[str, int] = getattr(torch.get_device_module(device), "memory_stats", lambda _: {})(device)
    return found


def requested_bytes(device: torch.device, which: Literal["current", "peak"]) -> int:
    """The bytes that tensors on the device have requested; a case is unmet where its allocator does not count them."""
    found = _memory_stats(device).get(f"requested_bytes.all.{which}")
    if found is None:
        lacking = f"torch.{device.type}.memory_stats.requested_bytes"
        raise private.MissingName(f"torch {torch.__version__} has no {lacking}, which measuring memory needs")
    return int(found)


def random_state() -> tuple[int, int]:
    """The seed and the offset of the generator of this process's device, which the host knows; zeros without one.

    A graph that is being captured has an offset of its own, which cannot be read.
    """
    module = _module()
    if module is None or not module.is_initialized():
        return 0, 0
    if getattr(module, "is_current_stream_capturing", lambda: False)():
        return 0, 0
    generator = module.default_generators[torch.accelerator.current_device_index()]
    return generator.initial_seed(), generator.get_offset()


@functools.cache
def _module() -> Any:
    """The module of the accelerator here, such as ``torch.xpu``, if it has generators; or None."""
    found = torch.get_device_module(kind) if (kind := accelerator()) else None
    return found if hasattr(found, "default_generators") else None


def occupies(device_type: str) -> bool:
    """Whether :func:`occupy` can keep a stream of the type busy: torch has a kernel for that on CUDA alone."""
    return device_type == "cuda"


def occupy(milliseconds: float, *, device_type: str) -> None:
    """Occupy the current stream of a device, and return at once; on the CPU, sleep."""
    if occupies(device_type):
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
