"""Adapter for ``torch.distributed.fsdp.fully_shard``."""

import dataclasses
from typing import Any

import torch
import torch.distributed.fsdp
from packaging.version import Version
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from shardproof.harness.adapters.capability import OPTIONS, Capability
from shardproof.harness.adapters.dtensor import DTensorAdapter
from shardproof.harness.tensors import private
from shardproof.harness.tensors.trees import full_of

#: Capabilities that a version of torch lacks or has, by the methods that they are. A setting is its setter.
_RECENT = {
    Capability.RECOVERY: "reset_iter_state",
    Capability.RANKS_DIFFER: "set_reduce_scatter_unused_params",
    Capability.MANUAL_BACKWARD_FINALIZATION: "finalize_backward",  # since torch 2.15
    **{one: one.replace("settings.", "set_") for one in OPTIONS if one.startswith("settings.")},
}


def missing_of(module: type) -> set[str]:
    """The capabilities that a sharded module of this class lacks, because it lacks the methods that they are.

    And those that came with the rule for single parameters of ``MixedPrecisionPolicy``: F-341 of findings/.
    """
    came_later = {Capability.GRADIENT_DTYPE, "parameter_dtypes"}
    lacks = {one for one, method in _RECENT.items() if not hasattr(module, method)}
    return lacks if hasattr(MixedPrecisionPolicy, "param_dtype_override_fn") else lacks | came_later


def gradient_traits(version: str) -> dict[str, Any]:
    """The traits about the dtypes of gradients, of units of ``fully_shard`` in this version of torch.

    It is compared by its release: a nightly build of 2.15.0 has what 2.15.0 has.
    """
    if Version(version).release < (2, 15):
        return {}
    return {"reduces_in": "parameters", "keeps_computed_gradients": True, "rounds_microbatches": True}


class TorchFullyShardAdapter(DTensorAdapter):
    """torch's per-parameter sharding with torch's clipping, which returns the norm as a DTensor.

    Its known failures are listed in ``suites/expectations/torch.fully_shard.toml``.
    """

    name = "torch.fully_shard"
    # Resharding to a smaller size makes a mesh with new process groups in every call of fully_shard.
    traits = dataclasses.replace(
        DTensorAdapter.traits, process_groups="abandoned", simulates=True,
        wrong_calls=frozenset(["F-2", "F-25", "F-29", "F-39", "F-46", "F-70", "F-180", "F-201", "F-243", "F-405"]),
        **gradient_traits(torch.__version__),
    )  # fmt: skip
    fully_shard = staticmethod(fully_shard)
    offload_policy = CPUOffloadPolicy
    precision_policy = MixedPrecisionPolicy
    if hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):  # not in torch 2.11
        mesh_dims = torch.distributed.fsdp.DataParallelMeshDims
    if hasattr(torch.distributed.fsdp, "share_comm_ctx"):
        share_comm_ctx = staticmethod(torch.distributed.fsdp.share_comm_ctx)
    register = staticmethod(register_fsdp_forward_method)

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        # fully_shard does not compare the order of units between ranks. A search among its combinations would stop at
        # known failures: F-2, F-21, F-24, F-25 and F-29 of findings/. RESHARD_A_PART is F-6, in which ranks wait
        # for each other.
        lacks = missing_of(FSDPModule)
        lacks |= {Capability.ORDER_VALIDATION, Capability.ANY_COMBINATION, Capability.RESHARD_A_PART}
        if private.find("torch.distributed.fsdp._fully_shard._fsdp_common.ShardPlacementResult") is None:
            lacks.add("parameter_meshes")
        if Version(torch.__version__).release < (2, 14):
            lacks.add(Capability.SPMD_TYPES)
        if Version(torch.__version__).release < (2, 15):
            lacks.add(Capability.ALL_GATHER_RELEASE)
        return super().capabilities() - lacks

    def norm_value(self, norm: torch.Tensor) -> torch.Tensor:
        return full_of(norm)
