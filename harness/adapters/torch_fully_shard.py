"""Adapter for ``torch.distributed.fsdp.fully_shard``."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from harness.adapters.capability import Capability
from harness.adapters.dtensor import DTensorAdapter


class TorchFullyShardAdapter(DTensorAdapter):
    """torch's per-parameter sharding with torch's clipping, whose norm is a DTensor."""

    name = "torch.fully_shard"
    # Resharding to a smaller size makes a mesh with new groups in every call of fully_shard.
    traits = dataclasses.replace(DTensorAdapter.traits, process_groups="abandoned")
    fully_shard = staticmethod(fully_shard)
    offload_policy = CPUOffloadPolicy
    register = staticmethod(register_fsdp_forward_method)

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        # docs/findings.md has both: F-1, after resharding to a smaller size that does not divide, what is
        # shown is cut in the wrong place; F-2, the inf-norm raises on a rank with an empty shard.
        lacking = {Capability.RESHARD_TO_SIZE_UNEVEN, Capability.CLIP_EMPTY_SHARDS, Capability.ORDER_VALIDATION}
        # F-3: seen to fail on 2.11 and to work on 2.13; 2.12 is untested.
        if torch.__version__ < TorchVersion("2.13"):
            lacking.add(Capability.DATACLASS_OUTPUT)
        return super().capabilities() - lacking

    def norm_value(self, norm: torch.Tensor) -> torch.Tensor:
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
