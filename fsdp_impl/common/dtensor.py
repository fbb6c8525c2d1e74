"""DTensors from local tensors, without the cost and the autograd node of ``DTensor.from_local``."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fsdp_impl.common.layout import contiguous_stride
from fsdp_impl.common.private import DTensorSpec, TensorMeta


def spec_for(mesh: DeviceMesh, placements: Sequence[Placement], size: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """The spec of a contiguous tensor of global ``size``, placed on ``mesh``."""
    meta = TensorMeta(size, contiguous_stride(size), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def meta_of(spec: DTensorSpec) -> TensorMeta:
    """Global size, stride and dtype."""
    assert spec.tensor_meta is not None, spec
    return spec.tensor_meta


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """``spec`` for the same tensor in ``dtype``."""
    if (meta := spec.tensor_meta) is not None and meta.dtype == dtype:
        return spec
    meta = meta_of(spec)
    return replace(spec, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))


def wrap(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor whose local tensor is ``local`` itself."""
    # Without __init__, which does nothing and takes as long as the rest: each step makes one for each gradient.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor itself, where ``to_local`` would make an alias of it."""
    assert isinstance(tensor, DTensor), type(tensor)
    return tensor._local_tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; any other tensor itself."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a DTensor, on the device of its mesh; another tensor is whole already. Collective over the mesh.

    The local tensor may be elsewhere: state dicts are moved to the CPU, and NCCL gathers nothing from there.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    moved = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(moved, DTensor)
    return moved.full_tensor()


def at_offset_zero(tensor: DTensor) -> DTensor:
    """A DTensor with the local tensor of ``tensor``, itself at the offset 0.

    A DTensor takes over the offset of its local tensor in the storage, and has no storage itself. What torch then
    reports as its address is not 0, for which ``copy.deepcopy`` and asynchronous saves take it for a plain tensor.
    """
    local = tensor._local_tensor
    if local.storage_offset() == 0:
        return tensor
    made = wrap(local.new_empty(0), tensor._spec)
    made._local_tensor = local
    return made
