"""What a user may choose for state dicts."""

from dataclasses import dataclass
from enum import Enum, auto


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
    """The base of all configurations of a module's state dict.

    Attributes:
        offload_to_cpu: return tensors on the CPU.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """
    Attributes:
        rank0_only: only the first rank of each group of shards returns anything.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Nothing further."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """
    Attributes:
        _use_dtensor: accepted and not looked at: values are DTensors.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """The base of all configurations of an optimizer's state dict.

    Attributes:
        offload_to_cpu: return tensors on the CPU.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """
    Attributes:
        rank0_only: only the first rank returns anything, and only its argument counts when loading.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Nothing further."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """
    Attributes:
        _use_dtensor: accepted and not looked at: values are DTensors.
    """

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
