"""Adapter for torch's ``FullyShardedDataParallel``, a module wrapper with one flat parameter per unit."""

import dataclasses
from typing import Any, ClassVar

import torch.distributed.fsdp

from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.flat import FlatAdapter


class TorchFsdpAdapter(FlatAdapter):
    """``torch.distributed.fsdp.FullyShardedDataParallel``."""

    name = "torch.fsdp"
    api: ClassVar[Any] = torch.distributed.fsdp
    # Models outlive their last reference: findings/F019.py.
    traits = dataclasses.replace(FlatAdapter.traits, frees_models=False, simulates=True)

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        # What it puts on the CPU where it is already, it frees: findings/F041.py.
        return super().capabilities() - {Capability.WHOLE_ON_CPU, Capability.FULL_PRECISION_EVALUATION}

    def _key_kinds(self) -> Any:
        from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType

        return OptimStateKeyType
