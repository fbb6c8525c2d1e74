"""What a user may choose for ``FullyShardedDataParallel``, and for the state dicts of it and of its optimizers."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn

from fsdp_impl.common.private import batch_norms


class ShardingStrategy(Enum):
    """What is sharded, over which ranks, and when parameters are gathered."""

    FULL_SHARD = auto()
    """Gather before forward and again before backward; parameters, gradients and optimizer state are sharded."""
    SHARD_GRAD_OP = auto()
    """Gather before forward and keep until the end of backward; inside ``no_sync`` keep for longer."""
    NO_SHARD = auto()
    """Shard nothing: all-reduce the gradients."""
    HYBRID_SHARD = auto()
    """``FULL_SHARD`` within a group of ranks, replicas across groups."""
    _HYBRID_SHARD_ZERO2 = auto()
    """``SHARD_GRAD_OP`` within a group of ranks, replicas across groups."""

    @property
    def is_hybrid(self) -> bool:
        """Whether there are replicas of the sharded parameters."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether units but the root's free their unsharded parameters between forward and backward."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class BackwardPrefetch(Enum):
    """When backward gathers the unit that comes next, the one whose forward came before this one's."""

    BACKWARD_PRE = auto()
    """Before this unit's backward: most overlap, and parameters of two units at a time."""
    BACKWARD_POST = auto()
    """After this unit's backward, before its reduction: less overlap, less memory."""


@dataclass
class MixedPrecision:
    """Dtypes inside forward and backward; ``None`` leaves a dtype as it is.

    Attributes:
        param_dtype: dtype of unsharded parameters, hence of the gather and of compute. Sharded parameters, and so the
            optimizer, keep their own.
        reduce_dtype: dtype in which gradients are reduced; ``None`` means ``param_dtype``.
        buffer_dtype: dtype to which floating-point buffers are cast at the first forward, and stay cast.
        keep_low_precision_grads: leave sharded gradients in the reduce dtype instead of the parameters' own.
        cast_forward_inputs: cast floating-point inputs of this unit's forward to ``param_dtype``.
        cast_root_forward_inputs: do so for the root, whatever ``cast_forward_inputs`` is.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    # Classes that automatic wrapping makes units of their own, without mixed precision.
    _module_classes_to_ignore: Sequence[type[nn.Module]] = batch_norms


@dataclass(frozen=True)
class Ignored:
    """What a wrapper leaves alone, with what wrappers inside it do.

    Attributes:
        modules: from the arguments, with all modules inside them but wrappers.
        params: theirs, and those from the arguments.
    """

    modules: frozenset[nn.Module]
    params: frozenset[nn.Parameter]

    def buffers(self) -> set[torch.Tensor]:
        return {buffer for module in self.modules for buffer in module.buffers()}


@dataclass
class CPUOffload:
    """Whether sharded parameters live on CPU, together with their gradients and the optimizer."""

    offload_params: bool = False


# State dicts


class StateDictType(Enum):
    """What ``state_dict()`` returns and ``load_state_dict()`` takes."""

    FULL_STATE_DICT = auto()
    """Whole tensors under the names of the module without wrappers."""
    LOCAL_STATE_DICT = auto()
    """This rank's shards of the flat parameters: for the same wrapping and the same number of ranks."""
    SHARDED_STATE_DICT = auto()
    """The parameters as DTensors, each sharded along its first dimension, under the names of the full ones."""


@dataclass
class StateDictConfig:
    """The base of all configurations of a module's state dict; ``offload_to_cpu``: return tensors on the CPU."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """With ``rank0_only`` only the first rank of each group of shards returns anything."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Nothing further."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """``_use_dtensor`` is accepted and not looked at: values are DTensors."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """The base of all configurations of an optimizer's state dict; ``offload_to_cpu``: return tensors on the CPU."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """With ``rank0_only`` only the first rank returns anything, and only its argument counts when loading."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Nothing further."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """``_use_dtensor`` is accepted and not looked at: values are DTensors."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """The type of state dict and both configurations."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def settings_of(
    kind: StateDictType = StateDictType.FULL_STATE_DICT,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """The settings of a type, with the configurations that belong to it where none are given.

    Raises:
        RuntimeError: for a configuration of another type.
    """
    expected, expected_optim = _CONFIGS[kind]
    config = expected() if config is None else config
    optim_config = expected_optim() if optim_config is None else optim_config
    if type(config) is not expected:
        raise RuntimeError(f"Expected state_dict_config of type {expected} but got {type(config)}")
    if type(optim_config) is not expected_optim:
        raise RuntimeError(f"Expected optim_state_dict_config of type {expected_optim} but got {type(optim_config)}")
    return StateDictSettings(kind, config, optim_config)
