"""What ``reshard_after_forward`` means on a given mesh."""

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_impl.common.mesh import ShardMesh

_logger = logging.getLogger("fsdp_impl")

# Smaller meshes by the shard group that they split. Each costs a process group of its own, and all units want the same.
_smaller_meshes: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], ShardMesh]]" = WeakKeyDictionary()


def resolve(reshard_after_forward: Any, mesh: ShardMesh) -> ShardMesh | None:
    """The mesh over which parameters are sharded after forward; ``None`` leaves them unsharded.

    Args:
        reshard_after_forward: ``True`` or ``None`` for ``mesh`` itself, ``False`` for none, an int for a mesh with
            groups of so many neighbouring ranks.
        mesh: the mesh that parameters are sharded over.

    Raises:
        ValueError: if it is neither ``None``, a bool nor an int, or an int that does not divide the shard size.
    """
    value = True if reshard_after_forward is None else reshard_after_forward
    if not isinstance(value, (bool, int)):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, "
            f"not {reshard_after_forward}"
        )
    if isinstance(value, bool):
        return mesh if value else None
    if value < 1 or mesh.size % value != 0:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {mesh.size}, not {value}"
        )
    if value == mesh.size:
        return mesh
    if value == 1:
        _warn_about_one()
        return None
    return _smaller_mesh(mesh, value)


_warned_about_one = False


def _warn_about_one() -> None:
    global _warned_about_one
    if not _warned_about_one:
        _warned_about_one = True
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
