"""What a user may choose about precision, offloading and mesh dimensions. Frozen: a policy is shared among units."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes at the borders of a unit; ``None`` leaves a dtype as it is.

    Attributes:
        param_dtype: dtype of unsharded parameters, hence of the gather and of compute. Sharded parameters, and so the
            optimizer, keep their own dtype.
        reduce_dtype: dtype in which gradients are reduced, and accumulated while they are not reduced. ``None`` means
            the dtype of compute.
        output_dtype: dtype to which floating-point outputs of forward are cast.
        cast_forward_inputs: whether floating-point inputs of forward are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading; the base of the policies that offload."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and optimizer state live on CPU.

    Attributes:
        pin_memory: whether they live in pinned memory, so that copies to and from the device overlap with compute.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names of the data-parallel dimensions of a mesh on which parameters already are DTensors.

    Attributes:
        shard: name or names of the dimensions to shard over; several are flattened into one.
        replicate: name or names of the dimensions to replicate over; several are flattened into one.

    Raises:
        ValueError: if both are ``None``.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("At least one of shard or replicate must be set in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
