"""Adapter for ``torch.distributed._composable.replicate_with_fsdp``: units of ``fully_shard`` that shard nothing."""

import dataclasses
import inspect
from typing import Any, ClassVar

import torch
import torch.distributed.fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, register_fsdp_forward_method

from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.dtensor import DTensorAdapter
from shardproof.harness.adapters.replicas import REPLICA
from shardproof.harness.adapters.torch_fully_shard import gradient_traits, missing_of
from shardproof.harness.tensors import private
from shardproof.harness.tensors.pieces import Cut
from shardproof.harness.tensors.trees import full_of

_REPLICATE = "torch.distributed._composable.replicate_with_fsdp.replicate"

#: What is about shards, about what is gathered or scattered, or about a mesh of several dimensions.
_SHARDING = Capability.of(
    "sharded reshard-after-forward reshard-to-size reshard-to-size-uneven reshard-a-part root-reshard hybrid "
    "accumulation.skips shard_dim unit_meshes parameter_meshes all-gather-extension all-gather-release "
    "all-gather-order explicit-prefetch counted-units tensor-parallel-counts registered-state unit-settings "
    "fsdp2-api settings.separate_reduce_scatter_group "
    "settings.reduce_scatter_max_input_buffers replicated order-validation single-rank spmd-types"
)


def _replicate(modules: Any, *, reshard_after_forward: None, **options: Any) -> Any:
    """Call ``replicate``, which has no choice of what forward frees."""
    assert reshard_after_forward is None, "replicate() has no such option"
    return private.need(_REPLICATE)(modules, **options)


class TorchReplicateWithFsdpAdapter(DTensorAdapter):
    """``replicate`` on each unit and the root. A control: it shards nothing."""

    name = "torch.replicate_with_fsdp"
    traits = dataclasses.replace(REPLICA, simulates=True, **gradient_traits(torch.__version__))
    fully_shard = staticmethod(_replicate)
    offload_policy = CPUOffloadPolicy
    precision_policy = MixedPrecisionPolicy
    if hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):  # not in torch 2.11
        mesh_dims = torch.distributed.fsdp.DataParallelMeshDims
    register = staticmethod(register_fsdp_forward_method)
    option_names: ClassVar[dict[str, str]] = {
        option: name for option, name in DTensorAdapter.option_names.items() if option != "reshard_after_forward"
    }

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        replicate = private.find(_REPLICATE)
        if replicate is not None and "mesh" not in inspect.signature(replicate).parameters:
            return f"replicate_with_fsdp of torch {torch.__version__} takes no mesh; that of torch 2.13 does"
        return None

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        module = private.find("torch.distributed._composable.replicate_with_fsdp.ReplicateModule")
        lacks = _SHARDING | {Capability.ANY_COMBINATION} | (frozenset() if module is None else missing_of(module))
        return super().capabilities() - lacks | {Capability.NO_SHARD}

    def _cut_of(self, name: str, cut: Cut, dim: int) -> Cut:
        return cut  # what tensor parallelism has left is whole on every rank

    def norm_value(self, norm: torch.Tensor) -> torch.Tensor:
        return full_of(norm)
