"""What a user may choose: frozen policies at construction; later, through setters, the options of each group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_impl.common.streams import Stream

# Policies, shared among units


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes at the borders of a unit; ``None`` leaves a dtype as it is.

    Attributes:
        param_dtype: dtype of unsharded parameters, hence of the gather and of compute. Sharded parameters, and so the
            optimizer, keep their own dtype.
        reduce_dtype: dtype in which gradients are reduced, and accumulated while they are not reduced. ``None`` means
            that of the sharded gradient (the parameter's ``grad_dtype``), whatever ``param_dtype`` is, and in a group
            with several the one that they promote to: the rule of torch since 2.15, here with every torch. A gradient
            is rounded once on its way, to this dtype: what autograd computes in a wider one than ``param_dtype`` is not
            rounded to that first, and is added to sums as it is.
        output_dtype: dtype to which floating-point outputs of forward are cast.
        cast_forward_inputs: whether floating-point inputs of forward are cast to ``param_dtype``.
        param_dtype_override_fn: is called once with each parameter, when it is sharded, and returns the parameter's own
            dtype if the unsharded one is to keep it; ``None`` and ``param_dtype`` mean ``param_dtype``. Ranks must
            agree.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)

    def _without_function(self) -> "MixedPrecisionPolicy":
        """What to keep once all parameters are sharded: the function may refer to the original ones."""
        return replace(self, param_dtype_override_fn=None)

    def _of(self, param: nn.Parameter, name: str) -> "MixedPrecisionPolicy":
        """The policy of one parameter, called ``name``; a ``ValueError`` if the function has a wrong result for it."""
        if self.param_dtype_override_fn is None:
            return self
        dtype = self.param_dtype_override_fn(param)
        if dtype not in (None, self.param_dtype, param.dtype):
            raise ValueError(
                f"Invalid param_dtype_override_fn result: {dtype} for parameter {name}, which may have None, "
                f"{self.param_dtype} or {param.dtype}"
            )
        return replace(self._without_function(), param_dtype=dtype or self.param_dtype)


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading; the base of the policies that offload."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and optimizer state live on CPU.

    With ``pin_memory`` in pinned memory, so that copies to and from the device overlap with compute.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class FSDPMeshInfo:
    """The data-parallel mesh of a parameter that has another than ``fully_shard`` was given.

    Attributes:
        mesh: 1-D to shard over, or 2-D (replicate, shard) with names.
        shard_mesh_dim: 0, or 1 of a 2-D mesh.
        replicate_mesh_dim: ``None``, or 0 of a 2-D mesh.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None


HSDPMeshInfo = FSDPMeshInfo


@dataclass(frozen=True)
class ShardPlacementResult:
    """What ``shard_placement_fn`` returns for a parameter with a mesh of its own; torch's own is taken too."""

    placement: Shard | None
    mesh_info: FSDPMeshInfo


# Replaced communication: user code's, or the buffers alone, by :mod:`communication`


class Comm(Protocol):
    """Where the buffers of a collective come from."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor of ``size`` for a collective to read or write, on the current stream."""
        ...


class Buffers(Comm):
    """Allocates buffers alone; :mod:`collectives` sends them."""


class AllGather(Comm, Protocol):
    """Replaces the all-gather (``set_custom_all_gather``)."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """As :func:`collectives.gather`."""
        ...


class ReduceScatter(Comm, Protocol):
    """Replaces the reduce-scatter (``set_custom_reduce_scatter``)."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """As :func:`collectives.reduce`."""
        ...


# Options of a group


@dataclass
class GroupOptions:
    """What setters of ``FSDPModule``, whose docstrings explain each, change about one group, at any time.

    Attributes:
        unshard_async: issue gathers of forward and backward asynchronously on the current stream.
        max_reduce_inputs: reduction inputs that may be in flight; the largest of all groups holds.
        reduce_group: process group of reduce-scatters, ``None`` without a sharded dimension. Another than the
            gathers' lets the two overlap on the wire.
    """

    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    unshard_async: bool = False
    keep_unsharded: bool = False
    reduce_unused: bool = False
    max_reduce_inputs: int = 1
    divide_factor: float | None = None
    force_sum: bool = False
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: Stream = None
    all_gather: AllGather | Buffers | None = None
    reduce_scatter: ReduceScatter | Buffers | None = None
    reduce_group: dist.ProcessGroup | None = None
