"""A reference implementation of fully sharded data parallel training, written to be read.

The names and signatures are those of ``torch.distributed.fsdp``.

Read ``docs/reference.md`` first, then the files in this order. A file is one subject. What holds across files is
written down once, under a name (``# Note: ownership``), to which the other places refer.

``common/``: ``owner``, ``phase``, ``streams``, ``hooks``, ``collectives``, ``divide``, ``comm_context``; the others
when they are met.

``per_parameter/``: ``construct`` (``fully_shard``), ``param`` (how one parameter is cut, and its forms), ``layout`` and
``shards`` (where the numbers lie), ``group`` (unshard and reshard), ``unit`` (what happens around forward and
backward), ``reduction`` (the way of a gradient), ``lazy_init`` (who is the root), ``module`` (what a user may call and
set), ``mesh`` and ``options``.

``flat/``: as its own docstring says.
"""

from fsdp_impl.common.clip import clip_grad_norm_
from fsdp_impl.flat import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp_impl.per_parameter import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
    validate_order,
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
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
