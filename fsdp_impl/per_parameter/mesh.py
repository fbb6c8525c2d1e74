"""Over which ranks parameters are sharded."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from fsdp_impl.common.mesh import check_replicas


class ShardMesh:
    """The data-parallel ranks and the place of this rank among them.

    Args:
        mesh: (shard,), (replicate, shard), or with ``sharded=False`` (replicate,).
        sharded: whether there is a sharded dimension; it is the last one then.

    Attributes:
        group: process group of the sharded dimension, ``None`` without one.
        replicas: process group of the ranks that hold the same shard, ``None`` without a replicated dimension.
    """

    def __init__(self, mesh: DeviceMesh, *, sharded: bool = True) -> None:
        self.mesh, self.sharded = mesh, sharded
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
