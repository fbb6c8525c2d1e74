"""What a case may leave behind in its ranks, compared before and after each case."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_MODULE_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


def picture(device_type: str, *, groups: int) -> dict[str, Any]:
    """The process-wide state that every case shares, by name.

    Args:
        device_type: whose autocast is looked at.
        groups: process groups that do not belong to the world.
    """
    state: dict[str, Any] = {
        "gradient mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled(device_type),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matrix products": torch.get_float32_matmul_precision(),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "process groups": groups,
        "working directory": os.getcwd(),
        "environment": dict(os.environ),
    }
    for name in _MODULE_HOOKS:
        state[f"modules' {name.strip('_').replace('_', ' ')}"] = len(getattr(torch.nn.modules.module, name))
    return state


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for each thing that is not as it was."""
    changed = [name for name, value in before.items() if after[name] != value]
    return [
        _environment(before[name], after[name])
        if name == "environment"
        else f"{name}: {before[name]} became {after[name]}"
        for name in changed
    ]


def _environment(before: dict[str, str], after: dict[str, str]) -> str:
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return f"environment variables changed: {', '.join(changed)}"
