"""What both halves ask of meshes."""

from collections.abc import Sequence

import torch
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
    """Refuse a (replicate, shard) mesh on which the ranks of a replicate group would hold different shards.

    A rank's shard is its place in the process group, which is sorted by rank. Rows of ranks in different orders would
    thus put different shards above each other, and gradients of different parameters would be averaged.
    """
    rows = mesh.mesh.tolist()
    orders = {tuple(sorted(range(len(row)), key=row.__getitem__)) for row in rows}
    if len(orders) > 1:
        raise ValueError(
            "The ranks of each replica must be in one order, as process groups are sorted by rank, but the mesh is "
            f"{rows}"
        )


def current_device(kind: str) -> torch.device:
    """The device that this rank computes on: CPU, or the current device of the type ``kind``, with its index."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())
