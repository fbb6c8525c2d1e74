"""A reference implementation of fully sharded data parallel training, written to be read.

The names and signatures are those of ``torch.distributed.fsdp``.

Read ``docs/reference.md`` first, then ``per_parameter/`` and ``flat/``, each in the order that its own docstring
states, and of ``common/`` what they need when it is met; begin there with ``owner``, ``streams``, ``hooks`` and
``collectives``. A file is one subject. What holds across files is written down once, under a name (``# Note:
ownership``), to which the other places refer.
"""

from fsdp_impl.common.clip import clip_grad_norm_
from fsdp_impl.flat.module import FullyShardedDataParallel
from fsdp_impl.flat.optim_state import OptimStateKeyType
from fsdp_impl.flat.options import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp_impl.per_parameter.construct import fully_shard
from fsdp_impl.per_parameter.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
    validate_order,
)
from fsdp_impl.per_parameter.options import (
    CPUOffloadPolicy,
    FSDPMeshInfo,
    HSDPMeshInfo,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)
from fsdp_impl.per_parameter.spmd import DataParallelMeshDims

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardPlacementResult",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "validate_order",
]
