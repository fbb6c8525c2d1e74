"""Adapter for the reference implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

import fsdp_impl
from shardproof.harness.adapters import reference_streams
from shardproof.harness.adapters.base import Clip, Config, OptimizerFactory
from shardproof.harness.adapters.dtensor import DTensorAdapter


class ReferenceAdapter(DTensorAdapter):
    """``fsdp_impl.fully_shard`` with ``fsdp_impl.clip_grad_norm_``.

    At ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` the order of the units is validated.
    """

    name = "reference"
    # Resharding to a smaller size makes its process groups once per mesh and reuses them.
    traits = dataclasses.replace(
        DTensorAdapter.traits,
        reduces_in="parameters",
        keeps_computed_gradients=True,
        process_groups="kept",
        simulates=True,
    )
    fully_shard = staticmethod(fsdp_impl.fully_shard)
    offload_policy = fsdp_impl.CPUOffloadPolicy
    precision_policy = fsdp_impl.MixedPrecisionPolicy
    mesh_dims = fsdp_impl.DataParallelMeshDims
    as_on_a_device = staticmethod(reference_streams.as_on_a_device)

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            fsdp_impl.validate_order(self.module)

    @staticmethod
    def register(module: nn.Module, name: str) -> None:
        fsdp_impl.register_fsdp_forward_method(module, name)

    def clip(self) -> torch.Tensor:
        assert self.config.clip is not None
        return self.clip_parameters(self.module.parameters(), self.config.clip)

    def clip_parameters(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip: Clip, *, foreach: bool | None = None
    ) -> torch.Tensor:
        return fsdp_impl.clip_grad_norm_(parameters, clip.max_norm, clip.norm_type, clip.raises, foreach)
