"""What both halves ask of meshes."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the dimensions of ``meshes``, which are parts of one mesh.

    Raises:
        ValueError: if one of them has no names.
    """
    for mesh in meshes:
        if mesh.mesh_dim_names is None:
            raise ValueError(f"FSDP with DTensor parameters needs meshes with mesh_dim_names, not {mesh}")
    joined: DeviceMesh = DeviceMesh._concatenate(list(meshes))
    return joined


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device that this rank computes on: CPU, or the current device of the mesh's type."""
    return current_device(mesh.device_type)


def current_device(kind: str) -> torch.device:
    """CPU, or the current device of the type ``kind``, with its index."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())
