"""What a case may leave behind in its ranks, compared before and after each case."""

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

#: What an implementation may set up when it is first used, so that only what comes after counts.
AFTER_FIRST_USE = ("threads", "open files", "modules", "device memory")

#: What torch.compile sets up once for the process and keeps: the thread of tqdm, which it makes a progress bar with for
#: each graph whether or not that is shown, and where Triton is to find its assembler and its cache.
_COMPILER_THREADS = ("tqdm_monitor",)
_COMPILER_VARIABLES = ("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH")

#: Device bytes that a case may leave in tensors: buffers that implementations reuse. Of the CPU no bytes are compared:
#: for a moment after a collective, gloo's threads still hold its tensors.
_MEMORY_GRAIN = 1 << 16


def picture(device: torch.device, *, groups: int, directory: str) -> dict[str, Any]:
    """The process-wide state that every case shares, by name.

    Args:
        device: whose autocast and tensors are looked at.
        groups: process groups that do not belong to the world.
        directory: the world's own; threads of NCCL open its rendezvous file whenever they look for news.
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
    """One line for each thing that is not as it was.

    Args:
        before: the picture before a case.
        after: the picture after it.
        excused: names of what the implementation may have changed.
    """
    changed = [name for name, value in before.items() if after[name] != value and name not in excused]
    return [line for name in changed if (line := _line(name, before[name], after[name]))]


def _line(name: str, before: Any, after: Any) -> str | None:
    if name == "environment":
        return f"environment variables changed: {', '.join(_keys_that_differ(before, after))}"
    if name == "device memory":
        return f"device memory: {after - before} bytes more" if after - before > _MEMORY_GRAIN else None
    if isinstance(before, list):
        more = _more(before, after)
        return f"{name}: {', '.join(more)}" if more else None
    return f"{name}: {before} became {after}"


def _keys_that_differ(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _more(before: list[str], after: list[str]) -> list[str]:
    """What is in ``after`` more often than in ``before``; what ended meanwhile was not left behind."""
    remaining = list(before)
    more = []
    for item in after:
        if item in remaining:
            remaining.remove(item)
        else:
            more.append(item)
    return more


def _open_files() -> list[str]:
    """Paths of the open regular files; sockets, pipes and devices belong to groups and drivers."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the descriptor of the listing itself
            continue
        if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/memfd:")):
            found.append(path)
    return sorted(found)
