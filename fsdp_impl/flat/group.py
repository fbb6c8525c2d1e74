"""The parameters of a unit: unshard and reshard."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.profiler import record_function

from fsdp_impl.common import collectives, dtensor, hooks, streams, unsharded
from fsdp_impl.common.streams import Event
from fsdp_impl.flat.buffer import Alias, FlatBuffer
from fsdp_impl.flat.context import FlatContext
from fsdp_impl.flat.shards import FlatShards, set_tensor


class PendingGather(NamedTuple):
    """A gather that was issued and not waited for; ``source``, its input, is kept while it may be read."""

    source: torch.Tensor
    event: Event


class FlatGroup:
    """One flat parameter, sharded and not.

    Attributes:
        label: names the unit in seams, profiles and errors.
        names: of the parameters from the root, for messages; from the wrapped module before lazy initialisation.
        shards: the sharded parameter.
        device: where it is computed with.
        param_dtype: of the unsharded parameter, ``None`` for that of the sharded one.
        is_unsharded: whether the unsharded values are there, or about to be (a gather may be in flight).
        wanted_in_backward: whether backward has yet to reach this unit, as far as forward could know.
        forward_indices: this group's places in the shared ``forward_order``.
    """

    def __init__(self, shards: FlatShards, device: torch.device, param_dtype: torch.dtype | None) -> None:
        self.label = "(not yet run)"
        self.names = list(shards.names)
        self.shards = shards
        self.ranks = shards.ranks
        self.device = device
        self.param_dtype = param_dtype
        self.context = FlatContext(device)
        self.is_unsharded = False
        self.wanted_in_backward = False
        self.forward_indices: list[int] = []
        self.on_gradient: Callable[[], None] | None = None
        # Version of the shard when it was gathered last, to notice an edit while the values are kept.
        self._gathered_version = 0
        self._pending: PendingGather | None = None
        self._views: list[torch.Tensor] = []
        self._buffer: FlatBuffer | Alias | None = None
        if not shards.use_orig:
            # Attributes that are read before the first forward have their shape and dtype, and no data yet.
            self._prepare_buffer()
            self._make_views_without_data()
            self.register_unsharded()

    @property
    def dtype(self) -> torch.dtype:
        """Of the unsharded parameter."""
        return self.param_dtype or self.shards.flat.dtype

    @property
    def leaf(self) -> torch.Tensor | None:
        """The unsharded flat parameter (1-D, ``layout.padded_numel``), whose ``grad`` autograd adds to."""
        return self._buffer.leaf if self._buffer is not None else None

    def share_context(self, context: FlatContext) -> None:
        """Use the streams and the window of ``context`` from now on."""
        self.context = context
        if self._buffer is not None:
            self._buffer.context = context

    def unshard(self) -> None:
        """Issue the gather on the gather stream; nothing if it was issued and not undone."""
        if self.is_unsharded:
            return
        stream = self.context.gather_stream
        if self.shards.adopt():
            streams.join(stream, streams.current(self.device))
        self._prepare_buffer()
        self.context.release_retired()
        buffer, flat = self._buffer, self.shards.flat
        with record_function(f"FSDP::gather ({self.label})"), torch.no_grad(), streams.use(stream):
            source = flat.detach()
            if isinstance(buffer, FlatBuffer):
                buffer.allocate()
                source = self._gather(source, buffer.target)
            self._pending = PendingGather(source, streams.record(stream))
        self._gathered_version = self._version()
        self.is_unsharded = True

    def wait_for_unshard(self) -> None:
        """Let the current stream use the unsharded parameter, and the modules hold views of it."""
        assert self.is_unsharded
        if self._pending is not None:
            # From here on an optimizer may also write to the source: on the current stream, after the gather.
            streams.wait(streams.current(self.device), self._pending.event)
            self._pending = None
        self._make_views()
        self.register_unsharded()

    def reshard(self) -> None:
        """Free the unsharded parameter; the modules hold the sharded ones again."""
        self.shards.register()
        if not self.is_unsharded:
            return
        if self._pending is not None:
            streams.wait(streams.current(self.device), self._pending.event)
            self._pending = None
        assert self._buffer is not None
        unsharded.reshard(self._buffer, unit=self.label)
        self.is_unsharded = False

    def is_stale(self) -> bool:
        """Whether the sharded parameters were changed after they were gathered."""
        return self.is_unsharded and (self._version() != self._gathered_version or self.shards.has_changed())

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
            self._views = self.views(self.leaf)

    def _make_views_without_data(self) -> None:
        """Views can only be made of memory that is there."""
        if isinstance(self._buffer, FlatBuffer):
            self._buffer.allocate()
        self._make_views()
        if isinstance(self._buffer, FlatBuffer):
            self._buffer.drop()

    def _gather(self, shard: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Fill ``output`` on the current stream; returns the gather's input, which must live until it has ended."""
        source = shard.to(output.device, output.dtype, non_blocking=True)
        if self.ranks.shard_group is None:
            output.copy_(source)
        else:
            collectives.gather(output, source, self.ranks.shard_group, unit=self.label)
        return source

    def _prepare_buffer(self) -> None:
        """Make the buffer, and make it anew when ``.to()`` and the like changed the sharded parameter."""
        flat, old = self.shards.flat, self._buffer
        self.shards.sync_requires_grad()
        if self.ranks.size == 1 and flat.dtype == self.dtype and flat.device == self.device:
            if not (isinstance(old, Alias) and old.leaf.data_ptr() == flat.data_ptr() and old.leaf.dtype == flat.dtype):
                self._buffer = Alias(flat)
        elif not (isinstance(old, FlatBuffer) and old.leaf.dtype == self.dtype):
            self._buffer = FlatBuffer(self.shards.layout.padded_numel, self.dtype, self.device)
        assert self._buffer is not None
        leaf = self._buffer.leaf
        if self._buffer is not old:
            self._buffer.context = self.context
            leaf.requires_grad_(True)
            hooks.call_when_accumulated(leaf, self._call_on_gradient)
            if old is not None and old.leaf.grad is not None:
                leaf.grad = old.leaf.grad.to(leaf.dtype)
        if leaf.requires_grad != flat.requires_grad:
            leaf.requires_grad_(flat.requires_grad)

    def _call_on_gradient(self) -> None:
        if self.on_gradient is not None:
            self.on_gradient()

    def _version(self) -> int:
        params = [self.shards.flat, *self.shards.originals]
        return sum(param._version for param in params)

    def __repr__(self) -> str:
        return f"FlatGroup({self.label})"


def _as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Differentiable: the gradient comes back placed as ``spec`` says, summed over its mesh where that is pending."""
    meta = dtensor.meta_of(spec)
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=meta.shape, stride=meta.stride)
