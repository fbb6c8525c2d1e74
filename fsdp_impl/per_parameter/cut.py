"""How one parameter is cut: along which dimension, on which mesh, and what a DTensor of its shards says."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from fsdp_impl.common import dtensor
from fsdp_impl.common.mesh import ShardMesh, concatenate

PlacementFn = Callable[[nn.Parameter], Shard | None]


@dataclass(frozen=True)
class Cut:
    """One original parameter and its cut.

    Attributes:
        data: what is cut: the parameter, or of a DTensor the local tensor.
        dim: along which dimension.
        spec: of the sharded parameter.
        unsharded: of the unsharded parameter, if that is a DTensor.
        data_parallel: the dimensions of ``unsharded``'s mesh over which FSDP itself reduces gradients.
    """

    data: torch.Tensor
    dim: int
    spec: DTensorSpec
    unsharded: DTensorSpec | None
    data_parallel: frozenset[int] = frozenset()


def cut(param: nn.Parameter, name: str, mesh: ShardMesh, placement_fn: PlacementFn | None) -> Cut:
    """Decide how ``param``, called ``name``, is cut over ``mesh``.

    Raises:
        ValueError: if ``placement_fn`` returns neither ``None`` nor a ``Shard``; if the mesh is one of named dimensions
            and ``param`` is not a DTensor on it, replicated over them.
        AssertionError: for a dimension that ``param`` does not have.
        NotImplementedError: for a dimension other than 0 that the ranks do not divide.
    """
    placement = placement_fn(param) if placement_fn is not None else None
    if placement is not None and not isinstance(placement, Shard):
        raise ValueError(f"Invalid shard_placement_fn result: {placement} for parameter {name}")
    data = dtensor.local_of(param) if isinstance(param, DTensor) else param.detach()
    dim = _checked_dim(placement, data, param, name, mesh)
    if mesh.spmd is not None:
        return _cut_spmd(param, data, name, dim, mesh)
    if isinstance(param, DTensor):
        return _cut_tensor_parallel(param, data, dim, mesh)
    spec = dtensor.spec_for(mesh.mesh, mesh.placements(Shard(dim)), param.size(), param.dtype)
    return Cut(data, dim, spec, None)


def _checked_dim(placement: Shard | None, data: torch.Tensor, param: nn.Parameter, name: str, mesh: ShardMesh) -> int:
    if placement is None:
        return 0
    dim = placement.dim + data.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < data.ndim:
        raise AssertionError(f"Shard dim {dim} is invalid for {data.ndim}D tensor: {param.shape} of {name}")
    if dim > 0 and data.size(dim) % mesh.size != 0:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: {data.size()} of {name} (world size: {mesh.size})"
        )
    return dim


def _shard(dim: int, split_factor: int) -> Placement:
    """Shard along ``dim``; strided if other mesh dimensions cut it before, into ``split_factor`` parts.

    The mesh lists data parallelism first, but it cuts last: what is cut is already a tensor-parallel shard. A plain
    ``Shard`` would claim the order of the mesh, and a full tensor would be put together in the wrong order.
    """
    return _StridedShard(dim, split_factor=split_factor) if split_factor > 1 else Shard(dim)


def _parts(mesh: DeviceMesh, placements: tuple[Placement, ...], dim: int, start: int = 0) -> int:
    """Into how many parts the mesh dimensions from ``start`` on cut ``dim``."""
    cutting = [
        mesh.size(index)
        for index, placement in enumerate(placements)
        if index >= start and isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim
    ]
    return math.prod(cutting)


def _cut_tensor_parallel(param: DTensor, data: torch.Tensor, dim: int, mesh: ShardMesh) -> Cut:
    """A DTensor on a mesh of its own dimensions (tensor, sequence or expert parallel) beside the data-parallel ones."""
    old = param._spec
    shard = _shard(dim, _parts(old.mesh, old.placements, dim))
    spec = dtensor.spec_for(
        concatenate([mesh.mesh, old.mesh]), (*mesh.placements(shard), *old.placements), param.size(), param.dtype
    )
    return Cut(data, dim, spec, old)


def _cut_spmd(param: nn.Parameter, data: torch.Tensor, name: str, dim: int, mesh: ShardMesh) -> Cut:
    """A DTensor on one mesh of all dimensions, some of which are the data-parallel ones."""
    assert mesh.spmd is not None
    full, dims = mesh.spmd
    if not isinstance(param, DTensor):
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
            f"distribute_module). Got plain tensor for parameter '{name}'."
        )
    old = param._spec
    if old.mesh is not full:
        raise ValueError(
            f"Expected the DTensor mesh of parameter '{name}' to be the same mesh passed to fully_shard, but got "
            f"different mesh objects: {old.mesh} and {full}"
        )
    names = full.mesh_dim_names
    assert names is not None
    data_parallel = frozenset(names.index(which) for which in (*dims.shard_names, *dims.replicate_names))
    for index in sorted(data_parallel):
        if not isinstance(old.placements[index], Replicate):
            raise ValueError(
                f"Expected Replicate() on DP dim '{names[index]}' (index {index}) of parameter '{name}' but got "
                f"{old.placements[index]}"
            )
    spec = _spmd_spec(old, dim, mesh, data_parallel)
    return Cut(data, dim, spec, old, data_parallel)


def _spmd_spec(old: DTensorSpec, dim: int, mesh: ShardMesh, data_parallel: frozenset[int]) -> DTensorSpec:
    assert mesh.spmd is not None
    full, dims = mesh.spmd
    names = full.mesh_dim_names or ()
    first = min((names.index(name) for name in dims.shard_names), default=0)
    shard = _shard(dim, _parts(full, old.placements, dim, start=first))
    meta = dtensor.meta_of(old)
    if len(dims.shard_names) <= 1 and len(dims.replicate_names) <= 1:
        placements = list(old.placements)
        if dims.shard_names:
            placements[first] = shard
        return dtensor.spec_for(full, placements, meta.shape, meta.dtype)
    # Flattened dimensions: the data-parallel mesh takes the place of all its names, ahead of the others.
    others = [index for index in range(full.ndim) if index not in data_parallel]
    shard = _shard(dim, _parts(full, old.placements, dim))
    joined = concatenate([mesh.mesh, *(full[names[index]] for index in others)]) if others else mesh.mesh
    placements = [*mesh.placements(shard), *(old.placements[index] for index in others)]
    return dtensor.spec_for(joined, placements, meta.shape, meta.dtype)
