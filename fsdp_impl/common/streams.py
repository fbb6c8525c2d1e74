"""Streams and events that exist on accelerators and cost nothing on CPU.

On CPU every stream and event is ``None``: work runs when it is called, so there is nothing to order. Code above
this module is written once, for accelerators, and runs unchanged on CPU.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch

Stream: TypeAlias = torch.Stream | None
Event: TypeAlias = torch.Event | None

# Copies around a collective are short and on the critical path, compute kernels are long: without priority a copy can
# sit behind compute that does not depend on it.
HIGH_PRIORITY = -1


@functools.cache
def _module_of(device_type: str) -> Any:
    return torch.get_device_module(device_type)


def _device_module(device: torch.device) -> Any:
    return _module_of(device.type)


def create(device: torch.device, *, priority: int = 0) -> Stream:
    """A new stream of ``device``, ``None`` on CPU."""
    if device.type == "cpu":
        return None
    stream: torch.Stream = _device_module(device).Stream(device=device, priority=priority)
    return stream


def current(device: torch.device) -> Stream:
    """The stream that the caller's kernels go to, ``None`` on CPU."""
    if device.type == "cpu":
        return None
    stream: torch.Stream = _device_module(device).current_stream(device)
    return stream


def use(stream: Stream) -> AbstractContextManager[Any]:
    """Make ``stream`` current inside the block; ``None`` leaves the current stream as it is."""
    if stream is None:
        return nullcontext()
    context: AbstractContextManager[Any] = _device_module(stream.device).stream(stream)
    return context


def record(stream: Stream) -> Event:
    """An event that marks everything queued on ``stream`` so far."""
    return None if stream is None else stream.record_event()


def wait(stream: Stream, event: Event) -> None:
    """Hold later work of ``stream`` until ``event``; the host does not wait."""
    if stream is not None and event is not None:
        stream.wait_event(event)


def join(stream: Stream, other: Stream) -> None:
    """Hold later work of ``stream`` until all that is queued on ``other`` now has run; the host does not wait."""
    if stream is not None and other is not None:
        stream.wait_stream(other)
