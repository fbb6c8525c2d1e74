"""Per-parameter sharding: every parameter is a DTensor, a unit's parameters share one collective."""

from fsdp_impl.per_parameter.construct import fully_shard
from fsdp_impl.per_parameter.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
    validate_order,
)
from fsdp_impl.per_parameter.options import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "validate_order",
]
