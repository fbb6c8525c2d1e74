"""Adapter of torch's ``FullyShardedDataParallel``: a wrapper whose units are flat parameters."""

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
    # F-19 of docs/findings.md.
    traits = dataclasses.replace(FlatAdapter.traits, frees_models=False)

    def gradients(self) -> dict[str, Piece | None]:
        device = self._picture_device
        if device is None or device.type == "cpu" or self.config.flat_parameters:
            return super().gradients()
        # F-18 of docs/findings.md: what reads whole gradients cannot read those on the CPU.
        named, mesh = self.named_parameters(), self.config.mesh
        group = mesh.get_group(mesh.ndim - 1)

        def parts(name: str) -> list[torch.Tensor]:
            everyone: list[Any] = [None] * self.config.shard_size
            dist.all_gather_object(everyone, named[name].grad, group=group)
            return [part.to(device) for part in everyone if part is not None]

        return {name: piece for unit in self._units for name, piece in unit.joined(parts)}


# Why it has not the other capabilities, as far as they were tried:
# - RESHARD_TO_SIZE, RESHARD_TO_SIZE_UNEVEN: no strategy does something between keeping and freeing.
# - ROOT_RESHARD: the root's unit is never freed after forward, because backward is expected to want it first.
# - GROUPED_UNIT: a wrapper takes one module.
# - POST_ACCUMULATE_GRAD_HOOK: gradients accumulate in the flat parameter; the original ones are views of it, and
#   their hooks never run.
# - NON_ROOT_FORWARD: only the root's backward ends with the callback that puts gradients in place and units back to
#   idle; after any other the next collective call raises "Cannot manually unshard parameters during forward/backward".
# - REGISTERED_STATE: after forward the root's parameters show shards although its unit is still gathered.
# - MANUAL_RESHARD: there is a context that gathers, and no call that frees.
# - GATHER_ORDER: the root's gradients are reduced last, whenever in backward they are ready.
# - SINGLE_RANK: it becomes NO_SHARD, which all-reduces each unit's gradients among the one rank.
# - DEFERRED_PER_UNIT: no_sync is for the root, and for all.
# - PAGEABLE_OFFLOAD, TENSOR_PARALLEL_CHECKPOINT: F-10 and F-17 of docs/findings.md. SINGLE_RANK has F-14 and F-16
#   besides.
