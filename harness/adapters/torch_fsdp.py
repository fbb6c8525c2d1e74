"""Adapter for torch's ``FullyShardedDataParallel``, a module wrapper with one flat parameter per unit."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp

from shardproof.harness.adapters.base import Piece
from shardproof.harness.adapters.flat import FlatAdapter


class TorchFsdpAdapter(FlatAdapter):
    """``torch.distributed.fsdp.FullyShardedDataParallel``."""

    name = "torch.fsdp"
    api: ClassVar[Any] = torch.distributed.fsdp
    # Models outlive their last reference: F-19 of docs/findings.md.
    traits = dataclasses.replace(FlatAdapter.traits, frees_models=False)

    def gradients(self) -> dict[str, Piece | None]:
        """Gather the gradients (collective), from the CPU by object collectives where they are offloaded."""
        device = self._picture_device
        if device is None or device.type == "cpu" or self.config.flat_parameters:
            return super().gradients()
        # summon_full_params cannot read gradients that are offloaded to the CPU: F-18 of docs/findings.md.
        named, mesh = self.named_parameters(), self.config.mesh
        group = mesh.get_group(mesh.ndim - 1)

        def parts(name: str) -> list[torch.Tensor]:
            everyone: list[Any] = [None] * self.config.shard_size
            dist.all_gather_object(everyone, named[name].grad, group=group)
            return [part.to(device) for part in everyone if part is not None]

        return {name: piece for unit in self._units for name, piece in unit.joined(parts)}


# Why the other capabilities are missing; those that are not listed have not been tried:
# - RESHARD_TO_SIZE, RESHARD_TO_SIZE_UNEVEN: a strategy either keeps parameters gathered after forward or frees them.
# - ROOT_RESHARD: the root's unit is never freed after forward, because backward is expected to need it first.
# - GROUPED_UNIT: a wrapper takes one module.
# - POST_ACCUMULATE_GRAD_HOOK: gradients accumulate in the flat parameter. The original parameters are views of it, and
#   their hooks never run.
# - NON_ROOT_FORWARD: only the root's backward ends with the callback that puts gradients in place and resets the units
#   to idle. After any other backward, the next collective call raises "Cannot manually unshard parameters during
#   forward/backward".
# - REGISTERED_STATE: after forward the root's parameters show shards although its unit is still gathered.
# - MANUAL_RESHARD: there is a context manager that gathers, but no call that frees.
# - GATHER_ORDER: the root's gradients are reduced last, no matter when in backward they are ready.
# - SINGLE_RANK: the strategy becomes NO_SHARD, which all-reduces each unit's gradients over the group of one rank. See
#   also F-14 and F-16 of docs/findings.md.
# - DEFERRED_PER_UNIT: no_sync is called on the root and applies to all units.
# - PAGEABLE_OFFLOAD: F-10 of docs/findings.md.
# - TENSOR_PARALLEL_CHECKPOINT: F-17 of docs/findings.md.
