"""Communication that setters replace, group by group: the memory of buffers, and the process group of reductions."""

import inspect
import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_impl.common.private import backend_of, symmetric_memory
from fsdp_impl.per_parameter.options import Buffers, GroupOptions

# The memory of buffers


class GroupMemory(Buffers):
    """Buffers from the process group's own allocator, which a back end can send from without copying."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend: Any = backend_of(self._group, device)
        if backend.supports_tensor_alloc(device):
            tensor: torch.Tensor = backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)
            return tensor
        return torch.empty(size, dtype=dtype, device=device)


class SymmetricMemory(Buffers):
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


def use_group_memory(options: GroupOptions, group: dist.ProcessGroup | None, *, enable: bool) -> None:
    """See ``FSDPModule.set_allocate_memory_from_process_group_for_comm``; ``group`` is the one of gathers."""
    _check_ours(options.all_gather, GroupMemory, "all-gather")
    _check_ours(options.reduce_scatter, GroupMemory, "reduce-scatter")
    if group is None or options.reduce_group is None:
        return
    options.all_gather = GroupMemory(group) if enable else None
    options.reduce_scatter = GroupMemory(options.reduce_group) if enable else None


def use_symmetric_memory(
    options: GroupOptions, group: dist.ProcessGroup | None, backend: str, device: torch.device, *, label: str
) -> None:
    """See ``FSDPModule.set_symm_mem_for_comm``; ``group`` is the one of gathers, ``label`` names the unit in errors."""
    if backend != "NCCL" or device.type != "cuda":
        raise NotImplementedError(
            f"set_symm_mem_for_comm supports backend NCCL on cuda, not {backend} on {device.type}"
        )
    _check_ours(options.all_gather, SymmetricMemory, "all-gather")
    _check_ours(options.reduce_scatter, SymmetricMemory, "reduce-scatter")
    check_reduce_inputs(options.max_reduce_inputs, symmetric=options.force_sum, label=label)
    if group is None or options.reduce_group is None:
        return
    options.all_gather = SymmetricMemory(group, backend)
    if options.force_sum:  # NCCL has sums only
        options.reduce_scatter = SymmetricMemory(options.reduce_group, backend)


def set_reduce_inputs(options: GroupOptions, count: int, *, label: str) -> None:
    """See ``FSDPModule.set_reduce_scatter_max_input_buffers``."""
    check_reduce_inputs(count, symmetric=isinstance(options.reduce_scatter, SymmetricMemory), label=label)
    options.max_reduce_inputs = count


def check_reduce_inputs(count: int, *, symmetric: bool, label: str) -> None:
    """Refuse several inputs in flight in symmetric memory, whose pool hands out one, whichever was set first."""
    if count > 1 and symmetric:
        raise ValueError(
            "set_reduce_scatter_max_input_buffers(>1) is not supported with the symmetric-memory reduce-scatter, but "
            f"got {count} for {label}"
        )


def _check_ours(comm: object, kind: type, name: str) -> None:
    if comm is not None and not isinstance(comm, kind):
        raise AssertionError(f"cannot change where buffers live when the {name} is custom: {type(comm).__name__}")


# The process group of reductions

# Shards lie in the order of the group of gathers. torch 2.12 sorts all groups.
_KEEPS_ORDER: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
)
# One more process group for each shard group, whatever the number of units on it: each is a communicator.
_reduce_groups: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()


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
        if isinstance(options.reduce_scatter, GroupMemory):
            options.reduce_scatter = GroupMemory(group)
        elif isinstance(options.reduce_scatter, SymmetricMemory):
            options.reduce_scatter = SymmetricMemory(group, options.reduce_scatter.backend)
    options.reduce_group = group
