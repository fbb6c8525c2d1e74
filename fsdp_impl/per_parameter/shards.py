"""The one buffer in which the sharded parameters of a group live, and what happens when something moves them out."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from fsdp_impl.common import modes
from fsdp_impl.common.changes import Changes
from fsdp_impl.common.layout import shard_rows
from fsdp_impl.common.owner import Owner
from fsdp_impl.common.private import foreach_copy_
from fsdp_impl.per_parameter.layout import BufferLayout, UnshardedBuffer, build_layout, shard_view, shard_views
from fsdp_impl.per_parameter.mesh import ShardMesh
from fsdp_impl.per_parameter.options import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fsdp_impl.per_parameter.param import Cut, ShardedParam, displaced

# Note: slots
#
# The buffer is the input of the gather: while every parameter lies in its slot, a gather copies nothing in. Parameters
# leave their slots when something replaces them (`.to()`, `to_empty`, `load_state_dict(assign=True)`, an optimizer that
# swaps tensors). What left is never written back to the old slot: whoever swapped it out may still hold the old tensor,
# and it must keep its values. When all have left they move into a new buffer together. While only some have, the rest
# stays where a state dict made earlier still sees it, and gathers copy in.


class Memory(NamedTuple):
    """A local tensor and where it lies: the address of a tensor without elements is 0 wherever it is."""

    local: torch.Tensor
    storage: torch.UntypedStorage | None
    offset: int

    def is_same(self, other: "Memory") -> bool:
        return self.local is other.local and self.storage is other.storage and self.offset == other.offset


class Shards:
    """The sharded parameters of one group.

    A derived class has those of which some choose themselves what is gathered (:mod:`extension`).

    Attributes:
        gather_layout: the slots of the gather's input, by the dtypes of compute; ``layout`` itself if those are equal.
        changes: of the sharded parameters.
        are_extended: whether some choose what is gathered, and all lie outside of a buffer.
    """

    are_extended = False

    def __init__(
        self,
        originals: Sequence[nn.Parameter],
        cuts: Sequence[Cut],
        owners: Sequence[list[Owner]],
        mesh: ShardMesh,
        precision: MixedPrecisionPolicy,
        offload: OffloadPolicy,
    ) -> None:
        self._mesh = mesh
        self.offloads = isinstance(offload, CPUOffloadPolicy)
        self.pins = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory
        sizes, dims = [cut.data.size() for cut in cuts], [cut.dim for cut in cuts]
        self.layout = build_layout(sizes, [cut.data.dtype for cut in cuts], mesh.size, mesh.rank, dims)
        self.changes = Changes()
        self._buffer: torch.Tensor | None = None
        policies = [precision._of(original, its[0].name) for original, its in zip(originals, owners, strict=True)]
        with torch.no_grad():
            locals_ = self._cut(cuts)
        self.params = [
            ShardedParam(original, cut, held_by, local, self.changes, precision=policy, in_slot=not self.are_extended)
            for original, cut, held_by, local, policy in zip(originals, cuts, owners, locals_, policies, strict=True)
        ]
        self.gather_layout = self._gather_layout()

    def versions(self) -> list[int]:
        """The version counters of all that user code can write to (see Note: stale values)."""
        # A DTensor counts what is done to it, and not what is done to its local tensor. That counts with all others in
        # its buffer, also in one that some have left.
        shards = [param.sharded for param in self.params]
        return [shard._version for shard in shards] + [shard._local_tensor._version for shard in shards]  # type: ignore[attr-defined]

    def memory(self) -> list[Memory]:
        """Where the local tensors lie that have no slot, or no elements, so that their address says nothing."""
        locals_ = [param.local for param in self.params if param.slot is None or param.slot_pointer == 0]
        return [Memory(local, local.untyped_storage(), int(local.storage_offset())) for local in locals_]

    def has_moved(self, since: Sequence[Memory]) -> bool:
        """Whether a local tensor has left its slot, or lies elsewhere than :meth:`memory` said."""
        found = self.memory()
        if len(found) != len(since) or any(not before.is_same(now) for before, now in zip(since, found, strict=True)):
            return True
        return any(not param.lies_in_slot() for param in self.params if param.slot is not None)

    @modes.without_grad
    def refresh(self) -> bool:
        """Notice parameters that were moved or replaced; once all were, move them into a new buffer (Note: slots).

        Returns whether it wrote to a new buffer, on the current stream.
        """
        moved = displaced(self.params)
        if not moved:
            return False
        for param in moved:
            param.adopt()
        left = len([param for param in moved if param.slot is None])
        is_written = left > 0 and self._refill(left)
        # A gather that follows sees what is adopted: the counters of other tensors are no change.
        self.changes.look(self.versions())
        return is_written

    def _refill(self, left: int) -> bool:
        """Lay the parameters out anew; returns whether all, as ``left`` have, left their slots for a new buffer."""
        layout = self._layout([param.dtype for param in self.params])
        if layout != self.layout:
            self.layout = layout
            self.gather_layout = self._gather_layout()
        self._buffer = None
        devices = {param.local.device for param in self.params}
        # Offloaded parameters that were moved to a device stay there until they are moved back: check_home names them.
        is_away = self.offloads and any(device.type not in ("cpu", "meta") for device in devices)
        if self.are_extended or left < len(self.params) or len(devices) > 1 or is_away:
            return False
        # Normal tensors even if this is first noticed under inference mode: training may follow.
        with torch.inference_mode(False), torch.no_grad():
            self._buffer = self._filled_buffer()
            for param, slot in zip(self.params, self.layout.slots, strict=True):
                param.move_to(shard_view(self._buffer, slot))
        return True

    def check_home(self) -> None:
        """Raise a ``RuntimeError`` that names the offloaded parameters that are not on the CPU."""
        if not self.offloads or (self._buffer is not None and self._buffer.device.type == "cpu"):
            return
        elsewhere = [(param.fqn, param.local.device) for param in self.params if param.local.device.type != "cpu"]
        if elsewhere:
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a CPU "
                'state dict or call module.to_empty(device="cpu"). Found following parameters on non-CPU device: '
                f"{elsewhere}"
            )

    @modes.without_grad
    def gather_input(self, device: torch.device) -> torch.Tensor:
        """What to gather: 1-D, in the order of ``gather_layout``, padding zero.

        The buffer itself, wherever it is and of the parameters' dtype, if all parameters lie in it and are cast to one
        dtype: it is moved and cast on its way into the gather's output (:mod:`fsdp_impl.common.collectives`). Else a
        copy, on ``device`` and in the memory of the current stream.
        """
        self.check_home()
        source = self._filled_buffer() if self._buffer is None else self._buffer
        if self.gather_layout is self.layout or torch.uint8 not in (self.layout.dtype, self.gather_layout.dtype):
            return source
        source = source.to(device, non_blocking=True)
        cast = torch.zeros(self.gather_layout.numel, dtype=self.gather_layout.dtype, device=device)
        for slot, wanted in zip(self.layout.slots, self.gather_layout.slots, strict=True):
            shard_view(cast, wanted).copy_(shard_view(source, slot))
        return cast

    def make_unsharded(self, device: torch.device) -> UnshardedBuffer:
        """Let the unsharded parameters live in memory that is returned, for a gather of ``gather_layout``."""
        buffer = UnshardedBuffer([param.size for param in self.params], self.gather_layout, device)
        with torch.inference_mode(False):
            for param, tensor in zip(self.params, buffer.tensors, strict=True):
                param.make_unsharded(tensor)
        return buffer

    # Of derived classes

    def find_extensions(self) -> None:
        """Look which parameters choose what is gathered, now that they are final."""

    def finish_unsharded(self) -> None:
        """The gathered tensors are in place: make unsharded parameters of them that are others."""

    def free_unsharded(self) -> None:
        """Free what :meth:`finish_unsharded` has allocated."""

    def _cut(self, cuts: Sequence[Cut]) -> list[torch.Tensor]:
        self._buffer = self._new_buffer(cuts[0].data.device)
        views = shard_views(self._buffer, self.layout.slots)
        for cut, view in zip(cuts, views, strict=True):
            start, rows = shard_rows(cut.data.size(cut.dim), self._mesh.size, self._mesh.rank)
            view.copy_(cut.data.narrow(cut.dim, start, rows))
        return views

    def _layout(self, dtypes: Sequence[torch.dtype]) -> BufferLayout:
        sizes, dims = [param.size for param in self.params], [param.dim for param in self.params]
        return build_layout(sizes, dtypes, self._mesh.size, self._mesh.rank, dims)

    def _gather_layout(self) -> BufferLayout:
        dtypes = [param.compute_dtype for param in self.params]
        return self.layout if dtypes == [param.dtype for param in self.params] else self._layout(dtypes)

    def _new_buffer(self, device: torch.device) -> torch.Tensor:
        home = torch.device("cpu") if self.offloads and device.type != "meta" else device
        pin = self.pins and home.type == "cpu"
        return torch.zeros(self.layout.numel, dtype=self.layout.dtype, device=home, pin_memory=pin)

    def _filled_buffer(self) -> torch.Tensor:
        buffer = self._new_buffer(self.params[0].local.device)
        views = shard_views(buffer, self.layout.slots)
        if not buffer.is_meta:
            foreach_copy_(views, [param.local for param in self.params])
        return buffer
