"""Which ranks a parameter is sharded over."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class ShardMesh:
    """A mesh and the place of this rank in its sharded dimension, the last one.

    Attributes:
        mesh: 1-D (shard), or 2-D (replicate, shard).
        group: process group of the sharded dimension.
        size: number of ranks in ``group``.
        rank: this rank's index in ``group``.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup = field(init=False, compare=False)
    size: int = field(init=False, compare=False)
    rank: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        last = self.mesh.ndim - 1
        object.__setattr__(self, "group", self.mesh.get_group(last))
        object.__setattr__(self, "size", self.mesh.size(last))
        object.__setattr__(self, "rank", self.mesh.get_local_rank(last))

    @property
    def placements(self) -> tuple[Placement, ...]:
        return (*(Replicate() for _ in range(self.mesh.ndim - 1)), Shard(0))


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


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device that this rank computes on: CPU, or the current device of the mesh's type."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
