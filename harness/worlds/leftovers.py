"""Detects process state that a case leaves behind in a rank.

``picture`` takes a snapshot of that state before and after each case, and ``differences`` compares the two.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardproof.harness.tensors import memory

_MODULE_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_parameter_registration_hooks",
)

#: Entries of the picture that may change when an implementation is first used in a process, because it may then set up
#: state that it keeps. Changes in later cases count as leaks.
AFTER_FIRST_USE = ("threads", "open files", "modules", "device memory")

#: State that torch.compile creates once and keeps for the life of the process: the monitor thread of tqdm, because it
#: makes a progress bar for each graph, shown or not, and the locations of Triton's assembler and cache.
_COMPILER_THREADS = ("tqdm_monitor",)
_COMPILER_VARIABLES = ("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH")

#: Bytes of device memory in tensors that a case may leave behind: implementations keep buffers for reuse. CPU memory is
#: not compared, because gloo's threads hold the tensors of a collective for a moment after it has ended.
_MEMORY_GRAIN = 1 << 16


def picture(device: torch.device, *, groups: int, directory: str) -> dict[str, Any]:
    """Take a snapshot of the process-wide state that all cases on this rank share.

    Args:
        device: the device whose autocast state and, on CUDA, tensor memory are included.
        groups: the number of process groups that do not belong to the world.
        directory: the world's directory. Open files in it are left out, because NCCL's threads open the rendezvous file
            whenever they poll it.

    Returns:
        The state by name; the names appear in messages.
    """
    state: dict[str, Any] = {
        "gradient mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled(device.type),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic cuDNN": torch.backends.cudnn.deterministic,
        "float32 matrix products": torch.get_float32_matmul_precision(),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "process groups": groups,
        "working directory": os.getcwd(),
        "environment": {name: value for name, value in os.environ.items() if name not in _COMPILER_VARIABLES},
        "threads": sorted(thread.name for thread in threading.enumerate() if thread.name not in _COMPILER_THREADS),
        "open files": [path for path in _open_files() if not path.startswith(f"{directory}/")],
    }
    for name in _MODULE_HOOKS:
        state[f"modules' {name.strip('_').replace('_', ' ')}"] = len(getattr(torch.nn.modules.module, name))
    state["modules"] = memory.module_names()
    if device.type == "cuda":
        state["device memory"] = memory.tensor_bytes(device)
    return state


def differences(before: dict[str, Any], after: dict[str, Any], *, excused: Collection[str]) -> list[str]:
    """Describe the differences between two pictures.

    Args:
        before: the picture before a case.
        after: the picture after it.
        excused: names of entries that the implementation may change.

    Returns:
        One line for each entry that changed. Items that disappeared from a list, such as threads that ended, and small
        growth of device memory are not reported.
    """
    changed = [name for name, value in before.items() if after[name] != value and name not in excused]
    return [line for name in changed if (line := _line(name, before[name], after[name]))]


def _line(name: str, before: Any, after: Any) -> str | None:
    if name == "environment":
        return f"environment variables changed: {', '.join(_keys_that_differ(before, after))}"
    if name == "device memory":
        return f"device memory: grew by {after - before} bytes" if after - before > _MEMORY_GRAIN else None
    if isinstance(before, list):
        more = _more(before, after)
        return f"{name}: {', '.join(more)}" if more else None
    return f"{name}: {before} became {after}"


def _keys_that_differ(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _more(before: list[str], after: list[str]) -> list[str]:
    """Return the items that ``after`` contains more often than ``before``.

    Items that are only in ``before`` have ended since and were not left behind.
    """
    remaining = list(before)
    more = []
    for item in after:
        if item in remaining:
            remaining.remove(item)
        else:
            more.append(item)
    return more


def _open_files() -> list[str]:
    """Return the paths of the open regular files.

    Sockets, pipes and devices are left out, because they belong to process groups and drivers.
    """
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the descriptor of the listing itself
            continue
        if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/memfd:")):
            found.append(path)
    return sorted(found)
