"""Give values to a module that was made on the meta device, and the same values to all ranks."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_impl.common import dtensor
from fsdp_impl.flat import collect
from fsdp_impl.flat.collect import Ignored
from fsdp_impl.flat.layout import flattened, is_dense
from fsdp_impl.flat.ranks import Ranks


def materialize(
    module: nn.Module, ignored: Ignored, init: Callable[[nn.Module], None] | None, device: torch.device
) -> None:
    """Make parameters and buffers on the meta device real: by ``init`` for each module, else by ``reset_parameters``.

    Raises:
        ValueError: if ``init`` is not callable.
    """
    if not _is_on_meta(module, ignored):
        return
    if init is not None and not callable(init):
        raise ValueError(f"Expected {init} to be callable but got {type(init)}")
    for child in _parents_first(module, ignored):
        if init is not None:
            init(child)
        elif [*child.parameters(recurse=False), *child.buffers(recurse=False)]:
            _reset(child, device)


def _reset(module: Any, device: torch.device) -> None:
    try:
        with torch.no_grad():
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()
    except BaseException as error:
        warnings.warn(
            f"Unable to call `reset_parameters()` for module on meta device with error {error}. Please ensure that "
            f"your module of type {type(module)} implements a `reset_parameters()` method.",
            stacklevel=5,
        )
        raise


def _is_on_meta(module: nn.Module, ignored: Ignored) -> bool:
    modules = [child for child in collect.managed_modules(module) if child not in ignored.modules]
    return any(param.is_meta for param in collect.unmanaged_params(module, ignored)) or any(
        buffer.is_meta for child in modules for buffer in child.buffers(recurse=False)
    )


def _parents_first(module: nn.Module, ignored: Ignored) -> Iterable[nn.Module]:
    managed = collect.managed_modules(module)
    queue, seen = deque([module]), {module}
    while queue:
        current = queue.popleft()
        yield current
        for child in current.children():
            if child in managed and child not in seen and child not in ignored.modules:
                seen.add(child)
                queue.append(child)


def sync_states(tensors: Iterable[torch.Tensor], ranks: Ranks, device: torch.device) -> None:
    """Give all ranks the values of ``tensors`` that the first one has; of a DTensor, its local part's. Collective.

    Raises:
        ValueError: if one is not where collectives run.
    """
    locals_ = [dtensor.local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]
    if any(local.device.type != device.type for local in locals_):
        raise ValueError(
            "The module has CPU parameters or buffers when `sync_module_states=True`, which requires them to be on "
            "GPU. Please specify the `device_id` argument or move the module to GPU before passing it to FSDP."
        )
    # Across replicas first: it brings the first rank's values to the first rank of every shard group.
    for group in dict.fromkeys([ranks.across, ranks.group]):
        if group is not None and group.size() > 1:
            for local in locals_:
                _broadcast(local.detach(), group)


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    with torch.no_grad():
        flat = flattened(tensor)
        dist.broadcast(flat, group_src=0, group=group)
        if not is_dense(tensor):
            tensor.copy_(flat.view(tensor.size()))
