"""The backend ``host``: kernels of collectives for PrivateUse1, which copy to the host, call gloo and copy back."""

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

NAME = "host"

#: The operators of ``c10d``. Each has first what it writes.
WRITING = (
    "_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_coalesced_",
    "allgather_into_tensor_coalesced_", "allreduce_", "allreduce_coalesced_", "alltoall_", "alltoall_base_",
    "broadcast_", "gather_", "recv_", "recv_any_source_", "reduce_", "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_", "scatter_",
)  # fmt: skip
READING = ("barrier", "send")

_LIBRARY = torch.library.Library("c10d", "IMPL")


def register() -> None:
    """Make ``host`` the default backend of the device, whatever its package has registered.

    A script names it all the same, ``init_process_group("host")``: a group of the default backend has none for the CPU.
    """
    device = torch._C._get_privateuse1_backend_name()
    # The package's own backend may be there and move nothing.
    dist.Backend.default_device_backend_map[device] = NAME
    dist.Backend.register_backend(NAME, _group, devices=["cpu", device])
    with warnings.catch_warnings():
        # torch has kernels for the key, which pass the call on to the group's backend.
        warnings.simplefilter("ignore")
        for name in WRITING + READING:
            operator = getattr(torch.ops.c10d, name).default
            _LIBRARY.impl(name, functools.partial(_through_host, operator, name in WRITING), "PrivateUse1")


def _group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    # Looked up at each call: others may have replaced the class.
    return distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _through_host(operator: Callable[..., Any], writes: bool, *args: Any) -> Any:
    """Run a collective on copies in the host's memory, and wait for it.

    What is sent may arrive later, from the copy that the work keeps.
    """
    copies = [_mapped(_copy, one) for one in args]
    result = operator(*copies)
    work = result[-1] if isinstance(result, tuple | list) else result
    if writes:
        dist.distributed_c10d.Work.unbox(work).wait()
        _write(args[0], copies[0])
    return (args[0], work) if isinstance(result, tuple | list) else work


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    return [_mapped(function, one) for one in value] if isinstance(value, list) else value


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


@torch.no_grad()
def _write(target: Any, source: Any) -> None:
    if isinstance(target, torch.Tensor):
        # A collective of torch's own leaves versions alone; tensors of inference have none.
        with nullcontext() if target.is_inference() else torch.autograd._unsafe_preserve_version_counter(target):
            target.copy_(source)
        return
    for one, other in zip(target, source, strict=True):
        _write(one, other)
