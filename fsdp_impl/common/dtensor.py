"""DTensors from local tensors, without the cost and the autograd node of ``DTensor.from_local``."""

from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp_impl.common.layout import contiguous_stride
from fsdp_impl.common.mesh import ShardMesh


def spec_for(mesh: ShardMesh, size: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """The spec of a contiguous tensor of global ``size``, sharded on ``mesh``."""
    return DTensorSpec(mesh.mesh, mesh.placements, tensor_meta=TensorMeta(size, contiguous_stride(size), dtype))


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """``spec`` for the same tensor in ``dtype``."""
    meta = spec.tensor_meta
    assert meta is not None
    return spec if meta.dtype == dtype else replace(spec, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))


def wrap(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor whose local tensor is ``local`` itself."""
    return DTensor(local, spec, requires_grad=False)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor itself, where ``to_local`` would make an alias of it."""
    assert isinstance(tensor, DTensor), type(tensor)
    return tensor._local_tensor


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Let the DTensor ``tensor`` live in the memory of ``local``, which holds the same values."""
    assert isinstance(tensor, DTensor), type(tensor)
    tensor._local_tensor = local
