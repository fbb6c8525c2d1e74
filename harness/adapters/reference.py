"""Adapter for the reference implementation."""

from __future__ import annotations

import dataclasses

import torch

import fsdp_impl
from harness.adapters.dtensor import DTensorAdapter


class ReferenceAdapter(DTensorAdapter):
    """``fsdp_impl.fully_shard``, with its own clipping."""

    name = "reference"
    # Resharding to a smaller size makes groups once per mesh and keeps them.
    traits = dataclasses.replace(DTensorAdapter.traits, process_groups="kept")
    fully_shard = staticmethod(fsdp_impl.fully_shard)
    offload_policy = fsdp_impl.CPUOffloadPolicy
    register = staticmethod(fsdp_impl.register_fsdp_forward_method)

    def clip(self) -> torch.Tensor:
        assert self.config.clip is not None
        clip = self.config.clip
        return fsdp_impl.clip_grad_norm_(self.module.parameters(), clip.max_norm, clip.norm_type)
