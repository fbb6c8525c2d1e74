"""Streams and events that exist on accelerators and cost nothing on CPU.

On CPU every stream and event is ``None``: work runs when it is called, so there is nothing to order. Code above
this module is written once, for accelerators, and runs unchanged on CPU.
"""

import functools
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch

Stream: TypeAlias = torch.Stream | None
Event: TypeAlias = torch.Event | None

# Copies around a collective are short and on the critical path, compute kernels are long: without priority a copy can
# sit behind compute that does not depend on it.
HIGH_PRIORITY = -1


@functools.cache
def _module_of(device_type: str) -> Any:
    return torch.get_device_module(device_type)


def create(device: torch.device, *, priority: int = 0) -> Stream:
    """A new stream of ``device``, ``None`` on CPU."""
    if device.type == "cpu":
        return None
    stream: torch.Stream = _module_of(device.type).Stream(device=device, priority=priority)
    return stream


def current(device: torch.device) -> Stream:
    """The stream that the caller's kernels go to, ``None`` on CPU."""
    if device.type == "cpu":
        return None
    stream: torch.Stream = _module_of(device.type).current_stream(device)
    return stream


def use(stream: Stream) -> AbstractContextManager[Any]:
    """Make ``stream`` current inside the block; ``None`` leaves the current stream as it is."""
    if stream is None:
        return nullcontext()
    context: AbstractContextManager[Any] = _module_of(stream.device.type).stream(stream)
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


# Streams of the collectives and the buffers in flight on them, shared by the units under one root.


# Note: reduction memory
#
# A reduction's input is memory of the current stream, read on the reduce stream; its output is memory of the reduce
# stream, worked on by the all-reduce stream where there are replicas. Neither is given to `record_stream`: a reference
# keeps it until the stream that could reuse its memory has waited for the stream that reads it.
#
# A sharded gradient is memory of the stream that accumulated it, and is read on the current stream (optimizer). When a
# user drops it, a later reduction may take its memory at once: the streams of reductions wait for the current stream of
# backward before each reduction, hence for whatever read the gradient.

# Reduce outputs in the hands of another stream. With one, a reduce-scatter overlaps with the all-reduce before it, and
# memory is bounded whatever the depth of the model.
_MAX_REDUCE_OUTPUTS = 1


class InFlight(NamedTuple):
    """A buffer that another stream reads until ``event``; dropping it frees it, so first a stream waits."""

    buffer: torch.Tensor
    event: Event


class CommContext:
    """Streams of the collectives, and the buffers of reductions in flight on them (see Note: reduction memory).

    Before lazy initialisation the streams are ``None``: an early ``unshard`` runs on the caller's stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Gathers have a stream, so that the next one overlaps with compute that is queued already.
        self.gather_stream: Stream = None
        # Reductions have another: in backward a gather must not queue behind a reduction, nor the reverse.
        self.reduce_stream: Stream = None
        # All-reduces over replicas, and the user's hooks in their place, have a third: they use other links.
        self.all_reduce_stream: Stream = None
        # Reduce inputs in flight. With one, the copy-in of the next group waits until the last reduction has read its
        # input: memory for one group's gradients, whatever the depth of the model.
        self.max_reduce_inputs = 1
        # By stream, after the last sharded gradient that was written there; it implies all earlier ones.
        self._reduced: dict[Stream, Event] = {}
        self._host_waits = False
        self._reduce_outputs: deque[InFlight] = deque()
        self._reduce_inputs: deque[InFlight] = deque()
        self._has_streams = False

    def create_streams(self) -> None:
        if not self._has_streams:
            self.gather_stream = create(self.device, priority=HIGH_PRIORITY)
            self.reduce_stream = create(self.device, priority=HIGH_PRIORITY)
            self.all_reduce_stream = create(self.device)
            self._has_streams = True

    def keep_reduce_input(self, contributions: torch.Tensor, reduced: Event) -> None:
        """Keep a reduction's input until the reduce stream has read it."""
        if reduced is not None:
            self._reduce_inputs.append(InFlight(contributions, reduced))

    def release_reduce_inputs(self, keep: int | None = None) -> None:
        """Free the oldest inputs but ``keep``: the current stream, whose memory they are, waits for the readers."""
        keep = self.max_reduce_inputs - 1 if keep is None else keep
        while len(self._reduce_inputs) > keep:
            wait(current(self.device), self._reduce_inputs.popleft().event)

    def keep_reduce_output(self, shards: torch.Tensor, done: Event) -> None:
        """Keep a reduce-scatter's output, memory of the reduce stream, while the all-reduce stream works on it.

        Also where it becomes a gradient: a hook may drop that before backward ends.
        """
        if done is not None:
            self._reduce_outputs.append(InFlight(shards, done))

    def release_reduce_outputs(self, keep: int = _MAX_REDUCE_OUTPUTS) -> None:
        """Free the oldest outputs but ``keep``: the reduce stream, whose memory they are, waits for the others."""
        while len(self._reduce_outputs) > keep:
            wait(self.reduce_stream, self._reduce_outputs.popleft().event)

    def note_reduced(self, stream: Stream, done: Event, *, host_waits: bool = False) -> None:
        """Gradients are written on ``stream`` until ``done``; the host must wait too if a copy to it is under way."""
        self._reduced[stream] = done
        self._host_waits |= host_waits

    def finish_reductions(self) -> None:
        """Let the current stream see all reduced gradients, and the host those that are copied to it."""
        self.release_reduce_inputs(keep=0)
        self.release_reduce_outputs(keep=0)
        for event in self._reduced.values():
            wait(current(self.device), event)
            if self._host_waits and event is not None:
                event.synchronize()
        self._reduced.clear()
        self._host_waits = False
