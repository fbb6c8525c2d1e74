"""Per-parameter sharding: every parameter is a DTensor, a unit's parameters share one collective."""

from fsdp_impl.per_parameter.fully_shard import fully_shard
from fsdp_impl.per_parameter.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
    validate_order,
)

__all__ = [
    "FSDPModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "validate_order",
]
