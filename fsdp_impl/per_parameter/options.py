"""What a user may choose: frozen policies at construction; later, through setters, the options of each group.

Among the options are communication back ends that take the place of the collectives, group by group.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_impl.common import collectives
from fsdp_impl.common.private import backend_of, symmetric_memory
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


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names of the data-parallel dimensions of a mesh on which parameters already are DTensors.

    Attributes:
        shard: name or names of the dimensions to shard over; several are flattened into one.
        replicate: those to replicate over, likewise.

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


# Replaced communication


class Comm(Protocol):
    """Where the buffers of a collective come from."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor of ``size`` for a collective to read or write, on the current stream."""
        ...


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


class _GroupMemory:
    """Buffers from the process group's own allocator, which a back end can send from without copying."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend: Any = backend_of(self._group, device)
        if backend.supports_tensor_alloc(device):
            tensor: torch.Tensor = backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)
            return tensor
        return torch.empty(size, dtype=dtype, device=device)


class _SymmetricMemory:
    """Buffers at the same place on every rank, which NCCL can read directly."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        self.backend = backend
        symmetric_memory("set_backend")(backend)
        self._pool_of = symmetric_memory("get_mem_pool")
        # Rendezvous needs the communicator, which NCCL makes at the first collective.
        dist.barrier(group=group)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._pool_of(device)):
            return torch.empty(size, dtype=dtype, device=device)


class _Gather:
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return collectives.gather(output_tensor, input_tensor, group, unit="", async_op=async_op)


class _Reduce:
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        collectives.reduce(output_tensor, input_tensor, group, op, unit="")
        return None


class GroupMemoryGather(_GroupMemory, _Gather):
    """The all-gather, with buffers of the process group."""


class GroupMemoryReduce(_GroupMemory, _Reduce):
    """The reduce-scatter, with buffers of the process group."""


class SymmetricGather(_SymmetricMemory, _Gather):
    """The all-gather, with buffers in symmetric memory."""


class SymmetricReduce(_SymmetricMemory, _Reduce):
    """The reduce-scatter, with buffers in symmetric memory; NCCL has sums only."""


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
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    reduce_group: dist.ProcessGroup | None = None


# Shards lie in the order of the group of gathers. torch 2.12 sorts all groups.
_KEEPS_ORDER: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
)
# One more process group for each shard group, whatever the number of units on it: each is a communicator.
_reduce_groups: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()


def use_group_memory(options: GroupOptions, group: dist.ProcessGroup | None, *, enable: bool) -> None:
    """See ``FSDPModule.set_allocate_memory_from_process_group_for_comm``; ``group`` is the one of gathers."""
    _check_ours(options.all_gather, GroupMemoryGather, "all-gather")
    _check_ours(options.reduce_scatter, GroupMemoryReduce, "reduce-scatter")
    if group is None or options.reduce_group is None:
        return
    options.all_gather = GroupMemoryGather(group) if enable else None
    options.reduce_scatter = GroupMemoryReduce(options.reduce_group) if enable else None


def use_symmetric_memory(
    options: GroupOptions, group: dist.ProcessGroup | None, backend: str, device: torch.device, *, label: str
) -> None:
    """See ``FSDPModule.set_symm_mem_for_comm``; ``group`` is the one of gathers, ``label`` names the unit in errors."""
    if backend != "NCCL" or device.type != "cuda":
        raise NotImplementedError(
            f"set_symm_mem_for_comm supports backend NCCL on cuda, not {backend} on {device.type}"
        )
    _check_ours(options.all_gather, SymmetricGather, "all-gather")
    _check_ours(options.reduce_scatter, SymmetricReduce, "reduce-scatter")
    check_reduce_inputs(options.max_reduce_inputs, symmetric=options.force_sum, label=label)
    if group is None or options.reduce_group is None:
        return
    options.all_gather = SymmetricGather(group, backend)
    if options.force_sum:
        options.reduce_scatter = SymmetricReduce(options.reduce_group, backend)


def set_reduce_inputs(options: GroupOptions, count: int, *, label: str) -> None:
    """See ``FSDPModule.set_reduce_scatter_max_input_buffers``."""
    check_reduce_inputs(count, symmetric=isinstance(options.reduce_scatter, SymmetricReduce), label=label)
    options.max_reduce_inputs = count


def check_reduce_inputs(count: int, *, symmetric: bool, label: str) -> None:
    """Refuse several inputs in flight in symmetric memory, whose pool hands out one, whichever was set first."""
    if count > 1 and symmetric:
        raise ValueError(
            "set_reduce_scatter_max_input_buffers(>1) is not supported with the symmetric-memory reduce-scatter, but "
            f"got {count} for {label}"
        )


def separate_reduce_group(options: GroupOptions, shared: dist.ProcessGroup | None, *, enable: bool) -> None:
    """See ``FSDPModule.set_separate_reduce_scatter_group``; ``shared`` is the group of gathers."""
    if shared is None or not enable:
        _reduce_over(options, shared)
        return
    if shared not in _reduce_groups:
        # Ranks of other shard groups may not come here: only the members wait for each other.
        _reduce_groups[shared] = dist.new_group(
            dist.get_process_group_ranks(shared),
            use_local_synchronization=True,
            group_desc="fsdp_reduce_scatter",
            **_KEEPS_ORDER,
        )
    _reduce_over(options, _reduce_groups[shared])


def _reduce_over(options: GroupOptions, group: dist.ProcessGroup | None) -> None:
    """Reduce over ``group``, in buffers of its allocator if they were of another group's."""
    if group is not None and group is not options.reduce_group:
        if isinstance(options.reduce_scatter, GroupMemoryReduce):
            options.reduce_scatter = GroupMemoryReduce(group)
        elif isinstance(options.reduce_scatter, SymmetricReduce):
            options.reduce_scatter = SymmetricReduce(group, options.reduce_scatter.backend)
    options.reduce_group = group


def _check_ours(comm: object, kind: type, name: str) -> None:
    if comm is not None and not isinstance(comm, kind):
        raise AssertionError(f"cannot change where buffers live when the {name} is custom: {type(comm).__name__}")
