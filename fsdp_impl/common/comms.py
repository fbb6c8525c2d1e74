"""Communication back ends that a user may put in place of the collectives, group by group."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_impl.common import collectives


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
        backend: Any = self._group._get_backend(device)
        if backend.supports_tensor_alloc(device):
            tensor: torch.Tensor = backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)
            return tensor
        return torch.empty(size, dtype=dtype, device=device)


class _SymmetricMemory:
    """Buffers at the same place on every rank, which NCCL can read directly."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self._memory: Any = symmetric_memory
        self._memory.set_backend(backend)
        # Rendezvous needs the communicator, which NCCL makes at the first collective.
        dist.barrier(group=group)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._memory.get_mem_pool(device)):
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
    """The reduce-scatter, with buffers in symmetric memory; NCCL's knows sums only."""
