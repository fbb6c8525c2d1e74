"""What a user may choose for ``FullyShardedDataParallel``."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


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
        cast_root_forward_inputs: do so for the root, whatever ``cast_forward_inputs`` says.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    # Classes that automatic wrapping makes units of their own, without mixed precision.
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)


@dataclass
class CPUOffload:
    """Where sharded parameters live.

    Attributes:
        offload_params: on CPU, together with their gradients and the optimizer.
    """

    offload_params: bool = False
