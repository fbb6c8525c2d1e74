"""The parameters of a unit: unshard and reshard, and the memory in which they are unsharded."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakMethod, ref

import torch
from torch.distributed.tensor import DTensor

from fsdp_impl.common import collectives, dtensor, hooks, modes, ranges, streams
from fsdp_impl.common.collectives import own_part, ready_to_gather
from fsdp_impl.common.private import DTensorSpec
from fsdp_impl.common.streams import CommContext, Event
from fsdp_impl.flat.shards import FlatShards, set_tensor

# Note: window of buffers
# The gather writes straight into the unsharded parameter: its bytes are memory of the gather stream, and compute on the
# current stream reads them. They may go to the next gather only after the current stream has read them, but a gather
# that waited for the latest compute could not overlap with it. So a window keeps the bytes of the last resharded unit:
# FlatBuffer.free records an event after all compute queued so far, FlatContext holds the buffer, and the gather stream
# waits for that event before the bytes are dropped or written again. Autograd keeps references to the tensors between
# forward and backward: the storage stays, its bytes come and go.

# Buffers that keep their bytes although compute with them is queued to its end, while a gather is issued that is needed
# next. In forward the host issues a unit's gather behind the compute of the unit before: it has to overlap with that,
# so it may not wait for it, and the unit's buffer is kept. Two buffers exist at most (retired, being gathered).
_MAX_RETIRED = 1
# The same, while a gather is issued ahead: before the compute that it overlaps with is queued. The unit before that has
# been retired; its compute ends where the compute to overlap with begins, so a gather that waits for it, and takes its
# bytes, loses nothing. Two buffers exist at most (computing, being gathered).
_MAX_RETIRED_AHEAD = 0


class FlatContext(CommContext):
    """Streams, and a window over the buffers whose compute may still be running (Note: window of buffers).

    Args:
        limits_gathers: whether gathers wait for compute at all, so that unsharded buffers are bounded; else bytes are
            reused only when the device is seen to be done with them, and a host that runs ahead takes more memory.
    """

    def __init__(self, device: torch.device, *, limits_gathers: bool = True) -> None:
        super().__init__(device)
        self.limits_gathers = limits_gathers
        self._retired: deque[tuple[FlatBuffer, torch.Event]] = deque()

    def retire(self, buffer: "FlatBuffer", used: torch.Event) -> None:
        """Free ``buffer`` some time after ``used``."""
        self._retired.append((buffer, used))

    def take_back(self, buffer: "FlatBuffer") -> Event:
        """Forget that ``buffer`` is to be freed; returns the event after which it may be written to, if it was."""
        for entry in self._retired:
            if entry[0] is buffer:
                self._retired.remove(entry)
                return entry[1]
        return None

    def release_retired(self, *, ahead: bool) -> None:
        """Free retired buffers before a gather allocates: the oldest, or what the device is done with.

        With ``ahead`` the gather is issued before the compute that it is to overlap with (Note: window of buffers).
        """
        keep = _MAX_RETIRED_AHEAD if ahead else _MAX_RETIRED
        while self._retired and (len(self._retired) > keep if self.limits_gathers else self._retired[0][1].query()):
            self._release_oldest()

    def release_all_retired(self) -> None:
        """Free all retired buffers, where compute ends anyway: after the root's forward and after backward."""
        while self._retired:
            self._release_oldest()

    def _release_oldest(self) -> None:
        buffer, used = self._retired.popleft()
        streams.wait(self.gather_stream, used)
        buffer.drop()


class FlatBuffer:
    """A storage for ``numel`` elements of ``dtype``, without bytes at first (Note: window of buffers).

    Attributes:
        leaf: what autograd differentiates with respect to.
        target: another tensor on the same storage, with its own version counter: a gather that writes to it does not
            look to autograd like a change of what it saved.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, context: FlatContext) -> None:
        self._nbytes = numel * dtype.itemsize
        # Normal tensors even if the first unshard happens under inference mode: training may follow.
        with torch.inference_mode(False), torch.no_grad():
            self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
            self.leaf, self.target = (
                torch.empty(0, dtype=dtype, device=device).set_(self._storage, 0, (numel,), (1,)) for _ in range(2)
            )
            # set_ gave the storage bytes, of the stream that is current here: compute queued on it may still be reading
            # what they held before, which the first gather, on its own stream, would overwrite.
            self.drop()
        self._device = device
        # Weak: its window may hold this buffer (Note: references).
        self._context = ref(context)

    def allocate(self) -> None:
        """Give the storage its bytes, in the memory of the current stream (the gather stream)."""
        retired = self._window().take_back(self)
        if retired is not None:
            # The bytes are still there; whoever read them before has to be done before the gather overwrites them.
            streams.wait(streams.current(self._device), retired)
        if self._storage.size() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Let the bytes go once all that is queued on the current stream has read them."""
        used: Event = streams.record(streams.current(self._device))
        if used is None:
            self.drop()
        else:
            self._window().retire(self, used)

    def use(self, context: FlatContext) -> None:
        self._context = ref(context)

    def _window(self) -> FlatContext:
        context = self._context()
        assert context is not None, "a buffer outlived its context"
        return context

    def drop(self) -> None:
        """Give the bytes back at once."""
        if self._storage.size() != 0:
            self._storage.resize_(0)

    @property
    def is_allocated(self) -> bool:
        return self._storage.size() == self._nbytes


class Alias:
    """Instead of a :class:`FlatBuffer` where nothing is sharded or cast: the flat parameter itself."""

    def __init__(self, flat: torch.Tensor) -> None:
        with torch.inference_mode(False):
            self.leaf = flat.detach()

    def free(self) -> None:
        """Nothing to free: these are the parameters themselves."""


class PendingGather(NamedTuple):
    """A gather that was issued and not waited for; ``source``, its input, is kept while it may be read."""

    source: torch.Tensor
    event: Event


class FlatGroup:
    """One flat parameter, sharded and not.

    Attributes:
        label: names the unit in seams, profiles and errors.
        names: of the parameters from the root, for messages; from the wrapped module before lazy initialisation.
        param_dtype: of the unsharded parameter, ``None`` for that of the sharded one.
        is_unsharded: whether the unsharded values are there, or about to be (a gather may be in flight).
        wanted_in_backward: whether backward has yet to reach this unit, as far as forward can determine.
        first_index: this group's place in the order of the first forward's gathers.

    Args:
        on_gradient: a bound method, called when autograd has added up the gradient of the unsharded parameter. It is
            held weakly (Note: references).
    """

    def __init__(
        self,
        shards: FlatShards,
        device: torch.device,
        param_dtype: torch.dtype | None,
        context: FlatContext,
        on_gradient: Callable[[], None],
    ) -> None:
        self.label = "(not yet run)"
        self.names = list(shards.names)
        self.shards = shards
        self.ranks = shards.ranks
        self.device = device
        self.param_dtype = param_dtype
        self.context = context
        self.is_unsharded = False
        self.wanted_in_backward = False
        self.first_index: int | None = None
        self._on_gradient = WeakMethod(on_gradient)
        self.changes = shards.changes
        # The shard's memory when it was gathered, kept for as long as what was gathered is.
        self._gathered_from: torch.Tensor | None = None
        self._pending: PendingGather | None = None
        self._views: list[torch.Tensor] = []
        self._viewed: torch.Tensor | None = None
        self._buffer: FlatBuffer | Alias | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the unsharded parameter."""
        return self.param_dtype or self.shards.flat.dtype

    @property
    def leaf(self) -> torch.Tensor | None:
        """The unsharded flat parameter (1-D, ``layout.padded_numel``), whose ``grad`` autograd adds to."""
        return self._buffer.leaf if self._buffer is not None else None

    def share_context(self, context: FlatContext) -> None:
        self.context = context
        if isinstance(self._buffer, FlatBuffer):
            self._buffer.use(context)

    def register(self) -> None:
        """Take the places of the original parameters in the modules, once and for all (Note: held by modules)."""
        self.shards.take_over()
        if not self.shards.use_orig:
            # Attributes that are read before the first forward have their shape and dtype, and no data yet.
            self._prepare_buffer()
            if isinstance(self._buffer, FlatBuffer):
                self._buffer.allocate()  # views can only be made of memory that is there
            self._make_views()
            if isinstance(self._buffer, FlatBuffer):
                self._buffer.drop()
            self.register_unsharded()

    def check_device(self) -> None:
        """Refuse shards on another device than the options demand: a ``RuntimeError`` that names the parameters."""
        found = self.shards.flat.device
        if self.shards.offloads and found.type != "cpu":
            raise RuntimeError(
                f"An FSDP-managed module with parameter CPU offloading enabled has parameters on {found}. Make sure to "
                f"not move the module from CPU when offloading parameters. Found for the parameters {self.names}"
            )
        if not self.shards.offloads and found != self.device:
            raise RuntimeError(
                f"An FSDP-managed module unexpectedly has parameters on {found}. Make sure to move the module to "
                f"{self.device} before training. Found for the parameters {self.names}"
            )

    @modes.without_func
    def unshard(self, *, ahead: bool = False) -> None:
        """Issue the gather on the gather stream; nothing if it was issued and not undone.

        ``ahead`` says that the compute it is to overlap with is not queued yet (Note: window of buffers).
        """
        if self.is_unsharded:
            self._sync_requires_grad()  # it may have been kept after an evaluation
            return
        stream = self.context.gather_stream
        # A gather of backward is also behind what user code has written to the shards since the root's forward began.
        if self._adopt() or self.changes.would_see(self.versions()):
            streams.join(stream, streams.current(self.device))
        self._prepare_buffer()
        self.context.release_retired(ahead=ahead)
        buffer, flat = self._buffer, self.shards.flat
        with ranges.named("gather", self.label), modes.no_grad(), streams.use(stream):
            source = flat.detach()
            if isinstance(buffer, FlatBuffer):
                buffer.allocate()
                source = self._gather(source, buffer.target)
            self._pending = PendingGather(source, streams.record(stream))
        self._gathered_from = flat.detach()
        self.is_unsharded = True

    @modes.without_func
    def wait_for_unshard(self, *, again: bool = False) -> None:
        """Let the current stream use the unsharded parameter, and the modules hold views of it.

        With ``again`` the views of the latest forward will do: a recomputation may differentiate through them too. For
        each forward they are made anew, because autograd runs first what was made last: through older views gradients
        would arrive when all others are computed, and nothing would hide their reduction.
        """
        assert self.is_unsharded
        if self._pending is not None:
            # From here on an optimizer may also write to the source: on the current stream, after the gather.
            streams.wait(streams.current(self.device), self._pending.event)
            self._pending = None
        if not (again and self._has_views()):
            self._make_views()
        self.register_unsharded()

    @modes.without_func
    def reshard(self) -> None:
        """Free the unsharded parameter; the modules hold the sharded ones again."""
        self.shards.register()
        if not self.is_unsharded:
            return
        if self._pending is not None:
            streams.wait(streams.current(self.device), self._pending.event)
            self._pending = None
        assert self._buffer is not None
        collectives.reshard(self._buffer, unit=self.label)
        self.is_unsharded, self._gathered_from = False, None

    # For `drop_stale` (see Note: stale values)

    def is_gathered(self) -> bool:
        """Whether the unsharded values are there, or a gather is in flight."""
        return self.is_unsharded

    def versions(self) -> list[int]:
        """The version counters of the sharded parameters."""
        return [self.shards.flat._version, *[param._version for param in self.shards.originals]]

    def has_moved(self) -> bool:
        """Whether a sharded parameter has other memory than when the group was gathered, or was replaced."""
        if self._gathered_from is None:
            return False
        moved = self._gathered_from.untyped_storage()._cdata != self.shards.flat.untyped_storage()._cdata
        return moved or self.shards.has_changed()

    def drop(self) -> None:
        """Reshard, and forget a gather in flight."""
        # First: resharding shows the shards again, and new data that a user gave the parameters is no part yet.
        self._adopt()
        self.reshard()

    def _adopt(self) -> bool:
        """Adopt, where the gather that follows sees what is adopted."""
        found = self.shards.adopt()
        if found:
            self.keep_up_to_date()
        return found

    def keep_up_to_date(self) -> None:
        """Let what was written to parameters, and is dropped again, be no change."""
        self.changes.look(self.versions())

    def gather_full(self, shard: torch.Tensor) -> torch.Tensor:
        """All of what ``shard`` (1-D, ``layout.shard_numel``, any dtype) is this rank's part of. Collective.

        Of the parameter itself, of its gradient or of an optimizer's state; on the current stream and in memory of its
        own: 1-D, ``layout.padded_numel``, on the device of compute.
        """
        full = torch.empty(self.shards.layout.padded_numel, dtype=shard.dtype, device=self.device)
        with torch.no_grad():
            self._gather(shard.detach(), full)
        return full

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in ``flat`` (1-D, ``layout.padded_numel``) in their shapes, DTensors where they were."""
        return [
            view if spec is None else _as_dtensor(view, spec)
            for view, spec in zip(self.shards.layout.split(flat), self.shards.specs, strict=True)
        ]

    def register_unsharded(self) -> None:
        """Let the modules hold plain tensors that are views of the unsharded parameter."""
        for view, owners in zip(self._views, self.shards.owners, strict=True):
            for owner in owners:
                set_tensor(owner, view, as_param=self.shards.use_orig)

    def _make_views(self) -> None:
        assert self.leaf is not None
        with torch.enable_grad():  # also under no_grad: recomputation may use what was registered there
            self._views, self._viewed = self._parts(self.leaf), self.leaf

    def _parts(self, leaf: torch.Tensor) -> list[torch.Tensor]:
        layout = self.shards.layout
        return self.views(leaf) if any(self.shards.specs) or not layout.is_contiguous else layout.parts(leaf)

    def _has_views(self) -> bool:
        """Whether there are views of the unsharded parameter as it is, also of whether it is frozen."""
        leaf = self.leaf
        return leaf is not None and self._viewed is leaf and self._views[0].requires_grad == leaf.requires_grad

    def _gather(self, shard: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Fill ``output`` on the current stream; returns the gather's input, which must live until it has ended."""
        if self.ranks.shard_group is None:
            return own_part(output, shard, 0)
        source = ready_to_gather(shard, output, self.ranks.rank)
        collectives.gather(output, source, self.ranks.shard_group, unit=self.label)
        return source

    def _prepare_buffer(self) -> None:
        """Make the buffer, and make it anew when ``.to()`` and the like changed the sharded parameter."""
        flat, old = self.shards.flat, self._buffer
        if self.shards.offloads:
            self.check_device()  # it may have been moved since the first forward
        if self.ranks.size == 1 and flat.dtype == self.dtype and flat.device == self.device:
            if not (isinstance(old, Alias) and old.leaf.data_ptr() == flat.data_ptr() and old.leaf.dtype == flat.dtype):
                self._buffer = Alias(flat)
        elif not (isinstance(old, FlatBuffer) and old.leaf.dtype == self.dtype):
            self._buffer = FlatBuffer(self.shards.layout.padded_numel, self.dtype, self.device, self.context)
        assert self._buffer is not None
        leaf = self._buffer.leaf
        if self._buffer is not old:
            leaf.requires_grad_(True)
            if (on_gradient := self._on_gradient()) is not None:
                hooks.call_when_accumulated(leaf, on_gradient)
            if old is not None and old.leaf.grad is not None:
                leaf.grad = old.leaf.grad.to(leaf.dtype)
        self._sync_requires_grad()

    def _sync_requires_grad(self) -> None:
        """Freeze and thaw the unsharded parameter as users did with what modules show of the sharded one."""
        assert self._buffer is not None
        self.shards.sync_requires_grad()
        if self._buffer.leaf.requires_grad != self.shards.flat.requires_grad:
            self._buffer.leaf.requires_grad_(self.shards.flat.requires_grad)

    def __repr__(self) -> str:
        return f"FlatGroup({self.label})"


def _as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Differentiable: the gradient gets the placements of ``spec``, summed over its mesh where that is pending."""
    meta = dtensor.meta_of(spec)
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=meta.shape, stride=meta.stride)
