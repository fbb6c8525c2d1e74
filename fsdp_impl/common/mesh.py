"""What both halves ask of meshes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_impl.common.private import concatenate_meshes


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the dimensions of ``meshes``, parts of one mesh; a ``ValueError`` if one of them has no names."""
    for mesh in meshes:
        if mesh.mesh_dim_names is None:
            raise ValueError(f"FSDP with DTensor parameters needs meshes with mesh_dim_names, not {mesh}")
    joined: DeviceMesh = concatenate_meshes(list(meshes))
    return joined


def check_replicas(mesh: DeviceMesh) -> None:
    """Refuse a (replicate, shard) mesh on which the ranks of a replicate group hold different shards.

    A rank's shard is its place in the process group, and gradients of different parameters would be averaged. Groups
    sort their ranks or keep the order of user code. A rank cannot see which in the groups of other rows: unless all
    rows of the mesh are sorted, where the ranks of each group only look at theirs, it compares places (collective).
    """
    rows = mesh.mesh.tolist()
    if all(row == sorted(row) for row in rows):
        differs = dist.get_process_group_ranks(mesh.get_group(1)) not in rows
    else:
        place = mesh.get_local_rank(1)
        # The highest place and the lowest one.
        places = torch.tensor([place, -place], device=current_device(mesh.device_type))
        dist.all_reduce(places, dist.ReduceOp.MAX, mesh.get_group(0))
        spread = places.sum()
        dist.all_reduce(spread, dist.ReduceOp.MAX, mesh.get_group(1))
        differs = bool(spread)
    if differs:
        raise ValueError(
            "The process groups of replicas must have their ranks in one order, that of the mesh or the sorted one, "
            f"but the mesh is {rows}"
        )


def current_device(kind: str) -> torch.device:
    """The device that this rank computes on: CPU, or the current device of the type ``kind``, with its index."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())
