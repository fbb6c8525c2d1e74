"""Which ranks a parameter is sharded over."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from fsdp_impl.common.policies import DataParallelMeshDims


@dataclass(frozen=True)
class ShardMesh:
    """The data-parallel ranks and the place of this rank among them.

    Attributes:
        mesh: (shard,), (replicate, shard), or with ``sharded=False`` (replicate,).
        sharded: whether there is a sharded dimension; it is the last one then.
        spmd: the mesh that parameters are DTensors on already, of which ``mesh`` is a part, and which of its
            dimensions are data parallel; ``None`` if ``mesh`` stands for itself.
        group: process group of the sharded dimension, ``None`` without one.
        size: number of ranks in ``group``.
        rank: this rank's index in ``group``.
        replicas: process group of the ranks that hold the same shard, ``None`` without a replicated dimension.
        replicate_size: number of ranks in ``replicas``.
    """

    mesh: DeviceMesh
    sharded: bool = True
    spmd: tuple[DeviceMesh, DataParallelMeshDims] | None = None
    group: dist.ProcessGroup | None = field(init=False, compare=False)
    size: int = field(init=False, compare=False)
    rank: int = field(init=False, compare=False)
    replicas: dist.ProcessGroup | None = field(init=False, compare=False)
    replicate_size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        last = self.mesh.ndim - 1
        replicated = self.mesh.ndim == 2 or not self.sharded
        computed = {
            "group": self.mesh.get_group(last) if self.sharded else None,
            "size": self.mesh.size(last) if self.sharded else 1,
            "rank": self.mesh.get_local_rank(last) if self.sharded else 0,
            "replicas": self.mesh.get_group(0) if replicated else None,
            "replicate_size": self.mesh.size(0) if replicated else 1,
        }
        for name, value in computed.items():
            object.__setattr__(self, name, value)

    def shard_dim_mesh(self) -> DeviceMesh:
        """The sharded dimension alone."""
        return self.mesh if self.mesh.ndim == 1 else self.mesh[_dim_names(self.mesh)[-1]]

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
    """Refuse meshes that are not (shard,) or a named (replicate, shard).

    Raises:
        ValueError: for other numbers of dimensions.
        AssertionError: for two dimensions without names.
    """
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(f"Please init the 2D mesh for HSDP with mesh_dim_names specified, not {mesh}")


def data_parallel_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> ShardMesh:
    """The data-parallel part of ``mesh``: all of it, or the named ``dims`` of a mesh that has others too.

    Several names of one kind are flattened into one dimension, which makes a process group the first time.

    Raises:
        ValueError: if the mesh has no names or not those, or as :func:`check_mesh` does.
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
    return ShardMesh(part, sharded=bool(dims.shard_names), spmd=(mesh, dims))


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the dimensions of ``meshes``, which are parts of one mesh."""
    for mesh in meshes:
        if mesh.mesh_dim_names is None:
            raise ValueError(f"FSDP with DTensor parameters needs meshes with mesh_dim_names, not {mesh}")
    joined: DeviceMesh = DeviceMesh._concatenate(list(meshes))
    return joined


def _one_dim(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def _dim_names(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None, mesh
    return mesh.mesh_dim_names


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device that this rank computes on: CPU, or the current device of the mesh's type."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
