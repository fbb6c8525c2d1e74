"""Flat parameters: the parameters of a unit are one tensor, which is sharded, gathered and reduced as a whole."""

from fsdp_impl.flat.module import FullyShardedDataParallel
from fsdp_impl.flat.optim_state_keys import OptimStateKeyType
from fsdp_impl.flat.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_impl.flat.state_dict_options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]
