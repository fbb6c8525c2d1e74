"""Flat parameters: the parameters of a unit are one tensor, which is sharded, gathered and reduced as a whole.

In the order in which to read them; imports point upward in this list alone:

1. ``options``: what a user may choose.
2. ``layout``: where each parameter lies in a flat parameter, and which part of it each rank holds.
3. ``ranks``: over which ranks it is sharded and replicated, and on which device it is computed with.
4. ``shards``: this rank's shard, and what the modules hold in the place of the parameters.
5. ``steps``: counts optimizer steps, which change nothing on some ranks.
6. ``group``: unshard and reshard, and the memory between the two.
7. ``reduction``: gradients reduced, accumulated, shown to optimizers, and their norm.
8. ``unit``: what happens around forward and backward, and which unit is gathered ahead.
9. ``registry``: which modules are wrappers, and what wrapping adds to names.
10. ``wrapping``: which modules are wrapped, and which parameters each wrapper takes.
11. ``construct``: from the constructor's arguments to a unit, and at the first forward to units under one root.
12. ``summon``: whole parameters on request.
13. ``state_dict``: state dicts, and parameters whole or sharded by rows.
14. ``optim_state``: state dicts of optimizers.
15. ``module``: ``FullyShardedDataParallel``, whose methods are names for all of this.

Invariants that several files rely on have a name and stand where they are kept: ``Note: held by modules`` (shards),
``Note: window of buffers`` (group), ``Note: unreduced gradients`` (reduction), ``Note: references`` (unit).
"""

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
