"""Over which ranks parameters are sharded, and what of that ``reshard_after_forward`` changes until backward."""

import functools
import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from fsdp_impl.common.mesh import check_replicas, concatenate
from fsdp_impl.common.private import flatten_mesh
from fsdp_impl.per_parameter.options import DataParallelMeshDims

_logger = logging.getLogger("fsdp_impl")

# Smaller meshes by the shard group that they split. Each costs a process group, so all units share them.
_smaller_meshes: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], ShardMesh]]" = WeakKeyDictionary()


class ShardMesh:
    """The data-parallel ranks and the place of this rank among them.

    Args:
        mesh: (shard,), (replicate, shard), or with ``sharded=False`` (replicate,).
        sharded: whether there is a sharded dimension; it is the last one then.
        spmd: the mesh that parameters are DTensors on already, of which ``mesh`` is a part, and which of its
            dimensions are data parallel; ``None`` if ``mesh`` stands for itself.

    Attributes:
        group: process group of the sharded dimension, ``None`` without one.
        replicas: process group of the ranks that hold the same shard, ``None`` without a replicated dimension.
    """

    def __init__(
        self, mesh: DeviceMesh, *, sharded: bool = True, spmd: tuple[DeviceMesh, DataParallelMeshDims] | None = None
    ) -> None:
        self.mesh, self.sharded, self.spmd = mesh, sharded, spmd
        last = mesh.ndim - 1
        replicated = mesh.ndim == 2 or not sharded
        self.group = mesh.get_group(last) if sharded else None
        self.size: int = mesh.size(last) if sharded else 1
        self.rank: int = mesh.get_local_rank(last) if sharded else 0
        self.replicas = mesh.get_group(0) if replicated else None
        self.replicate_size: int = mesh.size(0) if replicated else 1

    def shard_dim_mesh(self) -> DeviceMesh:
        """The sharded dimension alone."""
        names = self.mesh.mesh_dim_names or ()
        return self.mesh if self.mesh.ndim == 1 else self.mesh[names[-1]]

    def placements(self, shard: Placement) -> tuple[Placement, ...]:
        """Placements on ``mesh`` of what is placed ``shard`` on the sharded dimension."""
        if not self.sharded:
            return (Replicate(),)
        return (*(Replicate() for _ in range(self.mesh.ndim - 1)), shard)


def default_mesh() -> DeviceMesh:
    """All ranks in one dimension, on the accelerator if there is one, else on CPU."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuse meshes that are not (shard,) or a named (replicate, shard), and replicas that would hold other shards."""
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(f"Please init the 2D mesh for HSDP with mesh_dim_names specified, not {mesh}")
    if mesh.ndim == 2:
        check_replicas(mesh)


def data_parallel_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> ShardMesh:
    """The data-parallel part of ``mesh``: all of it, or the named ``dims`` of a mesh that has others too.

    Several names of one kind are flattened into one dimension, which makes a process group the first time.
    """
    if dims is None:
        check_mesh(mesh)
        return ShardMesh(mesh)
    if mesh.mesh_dim_names is None:
        raise ValueError(f"mesh must have mesh_dim_names when dp_mesh_dims is provided, not {mesh}")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in mesh.mesh_dim_names:
            raise ValueError(f"dp_mesh_dims name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}")
    kinds = [_one_dim(mesh, names) for names in (dims.replicate_names, dims.shard_names) if names]
    part = kinds[0] if len(kinds) == 1 else concatenate(kinds)
    if part.ndim == 2:
        check_replicas(part)
    return ShardMesh(part, sharded=bool(dims.shard_names), spmd=(mesh, dims))


def mesh_of_parameter(info: Any, name: str) -> ShardMesh:
    """The mesh of the parameter ``name``, whose placement comes with ``info``."""
    check_mesh(info.mesh)
    dims = (info.replicate_mesh_dim, info.shard_mesh_dim)
    if dims != ((None, 0) if info.mesh.ndim == 1 else (0, 1)):
        raise ValueError(
            f"Invalid shard_placement_fn result: a mesh for parameter {name} should be (shard,) or (replicate, shard), "
            f"but it is {info.mesh}, with the dimensions {dims} to replicate and to shard over"
        )
    return ShardMesh(info.mesh)


def _one_dim(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    if len(names) == 1:
        return mesh[names[0]]
    flat: DeviceMesh = flatten_mesh(mesh[names], "_".join(names))
    return flat


@dataclass(frozen=True)
class AfterForward:
    """Whether forward frees the unsharded parameters until backward.

    Where it does they stay sharded over the mesh ``smaller``, if that is not the unit's own.
    """

    frees: bool
    smaller: ShardMesh | None = None


KEEP = AfterForward(frees=False)
FREE = AfterForward(frees=True)


def after_forward(reshard_after_forward: Any, mesh: ShardMesh) -> AfterForward:
    """What ``reshard_after_forward`` means on ``mesh``; a ``ValueError`` if it means nothing there."""
    value = True if reshard_after_forward is None else reshard_after_forward
    if not isinstance(value, (bool, int)):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, "
            f"not {reshard_after_forward}"
        )
    if isinstance(value, bool):
        return FREE if value else KEEP
    if value < 1 or mesh.size % value != 0:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {mesh.size}, not {value}"
        )
    if value == mesh.size:
        return FREE
    if value == 1:
        _warn_about_one()
        return KEEP
    return AfterForward(frees=True, smaller=_smaller_mesh(mesh, value))


@functools.cache
def _warn_about_one() -> None:
    """Once in a process."""
    _logger.warning(
        "reshard_after_forward=1 (int) means resharding parameters to world size 1, "
        "instead of reshard_after_forward=True (bool)"
    )


def _smaller_mesh(mesh: ShardMesh, size: int) -> ShardMesh:
    assert mesh.group is not None
    ranks = mesh.mesh.mesh.view(-1, size)
    meshes = _smaller_meshes.setdefault(mesh.group, {})
    key = (size, mesh.mesh.device_type, tuple(ranks.flatten().tolist()))
    if key not in meshes:
        meshes[key] = ShardMesh(_mesh_of(ranks, mesh.mesh.device_type))
    return meshes[key]


def _mesh_of(ranks: torch.Tensor, device_type: str) -> DeviceMesh:
    """A mesh of ``ranks``, 2-D, with process groups of its own; called by all of them."""
    if ranks.numel() == dist.get_world_size():
        return DeviceMesh(device_type, ranks)
    # The other stages of a pipeline make groups of their own meanwhile. DeviceMesh numbers its groups, so that those of
    # two stages would have one name and meet in the store; these have names of their ranks, and nobody else takes part.
    (row, column) = (ranks == dist.get_rank()).nonzero()[0].tolist()
    members = (ranks[:, column].tolist(), ranks[row].tolist())
    groups = [dist.new_group(group, use_local_synchronization=True) for group in members]
    names = ("groups", "members")  # wanted of several dimensions; nothing asks for them
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)
