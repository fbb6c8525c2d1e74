"""Flat parameters: the parameters of a unit are one tensor, which is sharded, gathered and reduced as a whole."""

from fsdp_impl.flat.module import FullyShardedDataParallel
from fsdp_impl.flat.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "ShardingStrategy",
]
