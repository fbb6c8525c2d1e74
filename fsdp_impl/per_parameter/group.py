"""A group of parameters that are gathered by one collective: unshard and reshard."""

from enum import Enum, auto
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from fsdp_impl.common import collectives, modes, ranges, streams
from fsdp_impl.common.collectives import own_part, ready_to_gather
from fsdp_impl.common.iteration import Phase
from fsdp_impl.common.streams import CommContext, Event, InFlight
from fsdp_impl.per_parameter.layout import BufferLayout, UnshardedBuffer, copy_out
from fsdp_impl.per_parameter.mesh import ShardMesh
from fsdp_impl.per_parameter.options import Buffers, GroupOptions, MixedPrecisionPolicy
from fsdp_impl.per_parameter.shards import Memory, Shards


class Residence(Enum):
    """Which parameters the modules hold."""

    SHARDED = auto()
    POST_FORWARD = auto()  # other shards, between forward and backward (PostForwardShards)
    UNSHARDED = auto()


class PostForwardShards(Protocol):
    """Shards that take the places of unsharded parameters between forward and backward, which gathers from them.

    Attributes:
        buffer: the gather's input, laid out as ``layout``, for the ranks of ``mesh``; written on the current stream
            before ``written``.
    """

    buffer: torch.Tensor
    layout: BufferLayout
    mesh: ShardMesh
    written: Event

    def register(self) -> None:
        """Let the modules hold them."""
        ...

    def sync_requires_grad(self) -> None:
        """Notice what was frozen and unfrozen while the modules hold them."""
        ...


class AfterForward:
    """Keeps the unsharded parameters until backward; :mod:`smaller` has another for meshes inside."""

    def check(self, group: "ParamGroup") -> None:
        """Refuse, by a ``NotImplementedError``, final parameters of ``group`` for which this is not supported."""

    def reshard(self, group: "ParamGroup") -> None:
        """Act on ``group``, whose forward has ended."""


class FreeAfterForward(AfterForward):
    """Frees the unsharded parameters until backward."""

    def reshard(self, group: "ParamGroup") -> None:
        """Free what ``group`` has gathered."""
        group.to_sharded()


KEEP = AfterForward()
FREE = FreeAfterForward()


class PendingGather(NamedTuple):
    """A gather that was issued and not waited for.

    ``source``, its input, is kept because an asynchronous gather may still be reading it; it may be a part of
    ``output``. At shard size 1 nothing is in flight and ``output`` is the source.
    """

    source: torch.Tensor
    output: torch.Tensor
    layout: BufferLayout
    event: Event
    work: dist.Work | None


# Note: gather memory
#
# A gather's output is memory of the gather stream (of the current one for an explicit unshard), and the current stream
# copies it out. Whoever takes that memory next must do so after the copy-out. In backward the gather stream waits for
# it. In forward the next gather would then wait for the compute that is queued ahead of the copy-out: so the output is
# held until that gather has been issued, into other memory. Two outputs exist at most.
#
# The unsharded parameters are memory of the current stream, allocated at the copy-out and freed at reshard. They need
# no event, since compute that reads them is queued on the same stream.


class GatherContext(CommContext):
    """Streams and buffers in flight, a gather's output among them, shared by the units under one root."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._held_output: InFlight | None = None

    def hold_output(self, output: torch.Tensor, copied_out: Event) -> None:
        """Keep a gather's output past its copy-out (see Note: gather memory)."""
        if copied_out is not None:
            self._held_output = InFlight(output, copied_out)

    def release_output(self) -> None:
        """Free the held output: its memory belongs to the gather stream, which from here on waits for the copy-out."""
        if self._held_output is not None:
            streams.wait(self.gather_stream, self._held_output.event)
            self._held_output = None


class ParamGroup:
    """Parameters that are unsharded and resharded together; ``label`` names the unit in seams, profiles and errors."""

    def __init__(
        self,
        shards: Shards,
        mesh: ShardMesh,
        after_forward: AfterForward,
        device: torch.device,
        precision: MixedPrecisionPolicy,
    ) -> None:
        self.label = "(not yet run)"
        self.mesh = mesh
        self.after_forward = after_forward
        self.device = device
        self.precision = precision._without_function()
        self.options = GroupOptions(reduce_group=mesh.group)
        self.shards = shards
        self.residence = Residence.SHARDED
        self.comm = GatherContext(device)
        self.changes = shards.changes
        # Where the sharded parameters lay when they were gathered, for as long as that is used.
        self._gathered_from: list[Memory] = []
        self._pending: PendingGather | None = None
        self._post_forward: PostForwardShards | None = None
        self._unsharded: UnshardedBuffer | None = None
        self._unsharded_layout: BufferLayout | None = None

    def register(self) -> None:
        """Let the modules hold the sharded parameters."""
        for param in self.shards.params:
            param.register(param.sharded)

    @modes.without_func
    def unshard(self, phase: Phase, *, async_op: bool) -> None:
        """Issue the gather; nothing if it is in flight or the parameters are unsharded.

        ``phase`` is that of the unit for whose sake the group is gathered, its own or another.
        """
        if self._pending is not None or self.residence is Residence.UNSHARDED:
            return
        if phase is Phase.PRE_BACKWARD and not self.options.unshard_in_backward:
            return
        implicit = not async_op and phase in (Phase.FORWARD, Phase.PRE_BACKWARD)
        # The current stream is looked up only where it is needed: that costs as much as queueing a kernel.
        stream = self.comm.gather_stream if implicit else streams.current(self.device)
        # A gather of backward is also behind what user code has written to the shards since the root's forward began.
        if self.refresh() or (implicit and self.changes.would_see(self.versions())):
            streams.join(stream, streams.current(self.device))
        with ranges.named("gather", self.label), modes.no_grad(), streams.use(stream):
            if self.residence is Residence.SHARDED:
                self._gathered_from = self.shards.memory()
            source, layout, mesh = self._gather_source(stream)
            if mesh.size == 1:
                source = source.to(self.device, non_blocking=True).to(layout.dtype)
                self._pending = PendingGather(source, source, layout, streams.record(stream), None)
                return
            # Allocated in the memory of `stream` (see Note: gather memory).
            source, output, work = self._gather(source, layout, mesh, async_op=async_op)
            self._pending = PendingGather(source, output, layout, streams.record(stream), work if async_op else None)

    @modes.without_func
    def wait_for_unshard(self, phase: Phase) -> None:
        """Copy the gathered parameters out and register them; nothing if no gather is in flight.

        ``phase`` is that of the group's own unit.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if phase is Phase.FORWARD:
            # The group before this one: this group's gather has been issued (see Note: gather memory).
            self.comm.release_output()
        current = streams.current(self.device)
        if pending.work is not None:
            pending.work.wait()
        streams.wait(current, pending.event)
        with ranges.named("copy_out", self.label), modes.no_grad():
            self._copy_out(pending)
        self._register_unsharded()
        copied_out = streams.record(current)
        if pending.work is None and phase is Phase.FORWARD:
            self.comm.hold_output(pending.output, copied_out)
        else:
            # `pending` dies here, and its output returns to the memory of its stream (see Note: gather memory).
            streams.wait(self.comm.gather_stream, copied_out)

    @modes.without_func
    def reshard(self, phase: Phase) -> None:
        """Free the unsharded parameters and register the sharded ones; after forward as ``after_forward`` requires."""
        if phase is Phase.FORWARD:
            self.after_forward.reshard(self)
        else:
            self.to_sharded()

    def to_sharded(self) -> None:
        """Free the unsharded parameters and register the sharded ones, whatever the phase."""
        if self.residence is Residence.SHARDED:
            return
        self.sync_requires_grad()
        self.register()
        self._free_unsharded()
        self._post_forward = None
        self._gathered_from = []
        self.residence = Residence.SHARDED

    def to_post_forward(self, shards: PostForwardShards) -> None:
        """Free the unsharded parameters and register ``shards`` until backward."""
        self._post_forward = shards
        shards.register()
        self._free_unsharded()
        self.residence = Residence.POST_FORWARD

    def drop_pending(self) -> None:
        """Forget a gather in flight: its values would be older than whatever comes next."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if pending.work is not None:
            pending.work.wait()
        # The optimizer may write to the source, and others may take the memory of the output, once it has run.
        streams.wait(streams.current(self.device), pending.event)
        if self.residence is Residence.SHARDED:
            self._gathered_from = []

    # For `drop_stale` (see Note: stale values)

    def is_gathered(self) -> bool:
        """Whether the unsharded values are there, or a part of them, or a gather is in flight."""
        return self._pending is not None or self.residence is not Residence.SHARDED

    def versions(self) -> list[int]:
        """The version counters of the sharded parameters."""
        return self.shards.versions()

    def has_moved(self) -> bool:
        """Whether a sharded parameter has other memory than when the group was gathered."""
        return self.shards.has_moved(self._gathered_from)

    def drop(self) -> None:
        """Reshard, and forget a gather in flight."""
        self.drop_pending()
        self.to_sharded()

    def sync_requires_grad(self) -> None:
        """Notice what was frozen and unfrozen while modules hold others than the sharded parameters."""
        if self._post_forward is not None:
            self._post_forward.sync_requires_grad()
        elif self.residence is Residence.UNSHARDED:
            self._sync_unsharded()

    def _sync_unsharded(self) -> None:
        for param in self.shards.params:
            unsharded, trains = param.unsharded, param.trains
            assert unsharded is not None
            # Asked here: mostly nothing has changed, and what a call costs adds up.
            if unsharded.requires_grad is not trains or param.sharded.requires_grad is not trains:
                param.sync_requires_grad(unsharded)

    def refresh(self) -> bool:
        """Notice sharded parameters that were moved or replaced; whether the current stream wrote a new buffer."""
        return self.residence is Residence.SHARDED and self.shards.refresh()

    def _gather(
        self, source: torch.Tensor, layout: BufferLayout, mesh: ShardMesh, *, async_op: bool
    ) -> tuple[torch.Tensor, torch.Tensor, dist.Work | None]:
        assert mesh.group is not None
        numel, comm = mesh.size * layout.numel, self.options.all_gather
        if comm is None:
            output = torch.empty(numel, dtype=layout.dtype, device=self.device)
            source = ready_to_gather(source, output, mesh.rank)
            return source, output, collectives.gather(output, source, mesh.group, unit=self.label, async_op=async_op)
        output = comm.allocate((numel,), dtype=layout.dtype, device=self.device)
        own = own_part(output, source, mesh.rank)
        if isinstance(comm, Buffers):
            return own, output, collectives.gather(output, own, mesh.group, unit=self.label, async_op=async_op)
        return own, output, comm(output_tensor=output, input_tensor=own, group=mesh.group, async_op=async_op)

    def _gather_source(self, stream: streams.Stream) -> tuple[torch.Tensor, BufferLayout, ShardMesh]:
        """What to gather, laid out how, over which ranks."""
        if (held := self._post_forward) is not None:
            streams.wait(stream, held.written)
            return held.buffer, held.layout, held.mesh
        source = self.shards.gather_input(self.device)  # before the layout, which extensions decide anew
        return source, self.shards.gather_layout, self.mesh

    def _copy_out(self, pending: PendingGather) -> None:
        shards, layout = self.shards, self.shards.gather_layout
        if self._unsharded is None or self._unsharded_layout is not layout:
            self._unsharded = shards.make_unsharded(self.device)
            self._unsharded_layout = layout
        self._unsharded.allocate()
        rows = pending.output.view(pending.layout.world, -1)
        copy_out(rows, pending.layout, self._unsharded.targets(pending.layout))
        self.shards.finish_unsharded()

    def _register_unsharded(self) -> None:
        self._sync_unsharded()
        for param in self.shards.params:
            assert param.unsharded is not None
            param.register(param.unsharded)
        # The copy-out is queued behind the gather on the current stream, so nothing reads other shards any more.
        self._post_forward = None
        self.residence = Residence.UNSHARDED

    def _free_unsharded(self) -> None:
        if self._unsharded is not None and not self.options.keep_unsharded:
            collectives.reshard(self._unsharded, unit=self.label)
            self.shards.free_unsharded()

    def __repr__(self) -> str:
        return f"ParamGroup({self.label})"
