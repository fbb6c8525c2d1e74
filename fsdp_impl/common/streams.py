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
_NOTHING = nullcontext()


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
    # By its number: torch takes a device apart at each question, which costs more than the answer.
    stream: torch.Stream = _device_module(device).current_stream(device.index)
    return stream


def use(stream: Stream) -> AbstractContextManager[Any]:
    """Make ``stream`` current inside the block; ``None`` leaves the current stream as it is."""
    if stream is None:
        return _NOTHING
    module = _device_module(stream.device)
    if module.current_device() != stream.device_index:
        other: AbstractContextManager[Any] = module.stream(stream)
        return other
    return _Use(stream, module)


class _Use:
    """What ``torch.cuda.stream`` does on the current device, without asking twice which one that is."""

    __slots__ = ("_module", "_previous", "_stream")

    def __init__(self, stream: torch.Stream, module: Any) -> None:
        self._stream = stream
        self._module = module

    def __enter__(self) -> None:
        self._previous = self._module.current_stream(self._stream.device_index)
        self._module.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        self._module.set_stream(self._previous)


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
