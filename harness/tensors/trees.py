"""Traverses containers of tensors that a module may take or return.

Containers are tuples, lists, mappings, namedtuples and dataclasses, nested in any way.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: the shard of a DTensor, and a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor (collective), on its mesh's device; a plain tensor is returned itself.

    The shards of a state dict may be on the CPU, where a mesh of GPUs has no group: those of an optimizer's state are
    by default.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    on_device = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(on_device, DTensor)
    return on_device.full_tensor()


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in ``value``, in a fixed order. Other leaves are skipped."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in _parts(value):
            yield from tensors_of(part)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Rebuild ``value``, with containers of the same types, with ``function`` applied to every tensor.

    Other leaves are the same objects.
    """
    return map_leaves(function, value, kind=torch.Tensor)


def map_leaves(function: Callable[[Any], Any], value: Any, *, kind: type) -> Any:
    """Rebuild ``value`` with ``function`` applied to every instance of ``kind``; see :func:`map_tensors`."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Mapping):
        rebuilt: Any = type(value)
        return rebuilt({key: map_leaves(function, part, kind=kind) for key, part in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, part, kind=kind) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_leaves(function, part, kind=kind) for part in value)
    if _is_dataclass(value):
        fields = (field.name for field in dataclasses.fields(value) if field.init)
        return dataclasses.replace(value, **{n: map_leaves(function, getattr(value, n), kind=kind) for n in fields})
    return value


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (tuple, list)):
        yield from value
    elif _is_dataclass(value):
        yield from (getattr(value, field.name) for field in dataclasses.fields(value))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


# Copies tensors of a device to the host together: the host waits once for all of them, not once for each.


@torch.no_grad()
def on_host(value: Any) -> Any:
    """Return a container with all its tensors on the CPU; tensors that are there already are the same objects.

    Takes plain tensors, in what :func:`map_tensors` handles. Copies of equal dtype share a storage.
    """
    found: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in tensors_of(value) if tensor.device.type != "cpu"}
    if not found:
        return value
    copies: dict[int, torch.Tensor] = {}
    for kind in {(tensor.dtype, tensor.device) for tensor in found.values()}:
        alike = {key: tensor for key, tensor in found.items() if (tensor.dtype, tensor.device) == kind}
        flat = torch.cat([tensor.reshape(-1) for tensor in alike.values()]).cpu()
        pieces = flat.split([tensor.numel() for tensor in alike.values()])
        copies |= {key: piece.view(found[key].shape) for key, piece in zip(alike, pieces, strict=True)}
    return map_tensors(lambda tensor: copies.get(id(tensor), tensor), value)
