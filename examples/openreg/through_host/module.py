"""Names that ``fully_shard`` asks of a device's module, where it lacks them: torch has them for every device."""

import contextlib
from typing import Any

import torch


def register() -> None:
    """Give the device's module the names of streams and events that it lacks."""
    device = torch._C._get_privateuse1_backend_name()
    module = torch.get_device_module(device)

    class Stream(torch.Stream):
        """A stream of the device; those of ``torch.accelerator`` are instances too."""

        def __new__(cls, given: Any = None, priority: int = 0, **more: Any) -> Any:
            index = torch.accelerator.current_device_index() if given is None else torch.device(given).index
            return torch.Stream(device=torch.device(device, index), priority=priority, **more)

    class Event(torch.Event):
        """An event of the device."""

        def __new__(cls, enable_timing: bool = False, **more: Any) -> Any:
            return torch.Event(device=device, enable_timing=enable_timing)

    missing = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": torch.accelerator.current_stream,
        "stream": lambda one: contextlib.nullcontext() if one is None else one,
        "synchronize": torch.accelerator.synchronize,
    }
    for name, value in missing.items():
        if not hasattr(module, name):
            setattr(module, name, value)
