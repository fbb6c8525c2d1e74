"""Adapter for ``torch.distributed.fsdp.fully_shard``."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from harness.adapters.dtensor import DTensorAdapter


class TorchFullyShardAdapter(DTensorAdapter):
    """torch's per-parameter sharding with torch's clipping, whose norm is a DTensor."""

    name = "torch.fully_shard"
    # Resharding to a smaller size makes a mesh with new groups in every call of fully_shard.
    traits = dataclasses.replace(DTensorAdapter.traits, process_groups="abandoned")
    fully_shard = staticmethod(fully_shard)

    def clip(self) -> torch.Tensor:
        norm = super().clip()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
