"""What the units under one root share: streams, buffers in flight, and the state of the running iteration."""

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from fsdp_impl.common import streams
from fsdp_impl.common.streams import Event, Stream

if TYPE_CHECKING:
    from fsdp_impl.per_parameter.group import ParamGroup
    from fsdp_impl.per_parameter.unit import Unit

# Reduce inputs in flight. With one, the copy-in of the next group waits until the last reduction has read its input:
# memory for one group's gradients, whatever the depth of the model.
_MAX_REDUCE_INPUTS = 1


class InFlight(NamedTuple):
    """A buffer that another stream reads until ``event``; dropping it frees it, so first a stream waits."""

    buffer: torch.Tensor
    event: Event


class CommContext:
    """Streams of the collectives, and the buffers that they share among groups.

    Before lazy initialisation the streams are ``None``: an early ``unshard`` runs on the caller's stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Gathers have a stream, so that the next one overlaps with compute that is queued already.
        self.gather_stream: Stream = None
        # Reductions have another: in backward a gather must not queue behind a reduction, nor the reverse.
        self.reduce_stream: Stream = None
        # After the last sharded gradient is written. What follows backward waits on it; it implies all earlier ones.
        self.reduced_event: Event = None
        self._held_output: InFlight | None = None
        self._reduce_inputs: deque[InFlight] = deque()
        self._has_streams = False

    def create_streams(self) -> None:
        if not self._has_streams:
            self.gather_stream = streams.create(self.device, priority=streams.HIGH_PRIORITY)
            self.reduce_stream = streams.create(self.device, priority=streams.HIGH_PRIORITY)
            self._has_streams = True

    def hold_output(self, output: torch.Tensor, copied_out: Event) -> None:
        """Keep a gather's output past its copy-out, so that the next gather need not wait for the copy-out.

        The next gather writes to other memory, because this is still held; at most two outputs exist.
        """
        if copied_out is not None:
            self._held_output = InFlight(output, copied_out)

    def release_output(self) -> None:
        """Free the held output: its memory belongs to the gather stream, which from here on waits for the copy-out."""
        if self._held_output is not None:
            streams.wait(self.gather_stream, self._held_output.event)
            self._held_output = None

    def keep_reduce_input(self, contributions: torch.Tensor, reduced: Event) -> None:
        """Keep a reduction's input until the reduce stream has read it."""
        if reduced is not None:
            self._reduce_inputs.append(InFlight(contributions, reduced))

    def release_reduce_inputs(self, keep: int = _MAX_REDUCE_INPUTS - 1) -> None:
        """Free the oldest inputs but ``keep``: the current stream, whose memory they are, waits for the readers."""
        while len(self._reduce_inputs) > keep:
            streams.wait(streams.current(self.device), self._reduce_inputs.popleft().event)

    def finish_reductions(self) -> None:
        """Let the current stream see all reduced gradients."""
        self.release_reduce_inputs(keep=0)
        streams.wait(streams.current(self.device), self.reduced_event)
        self.reduced_event = None


class IterationContext:
    """The state of one forward and backward of the units under one root.

    Attributes:
        units: all units under the root, in the order of ``named_modules()``.
        forward_root: the unit whose forward is outermost just now. Not always the root: a part may run by itself.
        forward_order: groups in the order of their post-forwards since the last backward, with repeats.
        callback_queued: whether this backward's final callback is queued.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.forward_root: Unit | None = None
        self.forward_order: list[ParamGroup] = []
        self.callback_queued = False
