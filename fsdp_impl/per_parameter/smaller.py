"""Sharding over fewer ranks between forward and backward: ``reshard_after_forward`` as an int.

That costs more memory than full sharding, and a cheaper gather in backward, over ranks that are close to each other.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_impl.common import dtensor, streams
from fsdp_impl.common.layout import shard_rows
from fsdp_impl.common.private import DTensorSpec, foreach_copy_
from fsdp_impl.per_parameter.group import FREE, KEEP, AfterForward, ParamGroup, Residence
from fsdp_impl.per_parameter.layout import build_layout, shard_views
from fsdp_impl.per_parameter.mesh import ShardMesh
from fsdp_impl.per_parameter.param import ShardedParam

_logger = logging.getLogger("fsdp_impl")

# Smaller meshes by the shard group that they split. Each costs a process group, so all units share them.
_smaller_meshes: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], ShardMesh]]" = WeakKeyDictionary()


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
    return ToSmaller(_smaller_mesh(mesh, value))


@functools.cache
def _warn_about_one() -> None:
    """Once in a process."""
    _logger.warning(
        "reshard_after_forward=1 (int) means resharding parameters to world size 1, "
        "instead of reshard_after_forward=True (bool)"
    )


class ToSmaller(AfterForward):
    """Frees the unsharded parameters and registers shards over ``mesh`` until backward."""

    def __init__(self, mesh: ShardMesh) -> None:
        self._mesh = mesh

    def check(self, group: ParamGroup) -> None:
        """Refuse extended all-gathers and DTensors, whose placements would be those of the smaller mesh too."""
        kind = "tensors that extend the all-gather" if group.shards.are_extended else ""
        if any(param.unsharded_form is not None for param in group.shards.params):
            kind = "DTensor parameters"
        if kind:
            raise NotImplementedError(
                f"Resharding to smaller mesh is not supported for {kind} yet: "
                f"reshard_after_forward={self._mesh.size} in {group.label}"
            )

    def reshard(self, group: ParamGroup) -> None:
        """Cut the unsharded parameters, where they are there, for the smaller mesh."""
        if group.residence is Residence.UNSHARDED:
            group.sync_requires_grad()
            group.to_post_forward(SmallerShards(group.shards.params, self._mesh, group.device))


class SmallerShards:
    """Shards of unsharded ``params`` over ``mesh``.

    They are laid out anew for the smaller number of ranks, so that the DTensors that the modules hold meanwhile are cut
    where a DTensor on that mesh is expected to be cut, also when the rows do not divide.
    """

    @torch.no_grad()
    def __init__(self, params: Sequence[ShardedParam], mesh: ShardMesh, device: torch.device) -> None:
        self.mesh = mesh
        self._params = params
        self.layout = build_layout(
            [p.size for p in params], [p.compute_dtype for p in params], mesh.size, mesh.rank, [p.dim for p in params]
        )
        self.buffer = torch.zeros(self.layout.numel, dtype=self.layout.dtype, device=device)
        views = shard_views(self.buffer, self.layout.slots)
        foreach_copy_(views, [_part_of(param, mesh) for param in params])
        self.written = streams.record(streams.current(device))
        self._smaller = [
            nn.Parameter(dtensor.wrap(view, _spec_of(param, mesh)), requires_grad=param.sharded.requires_grad)
            for param, view in zip(params, views, strict=True)
        ]

    def register(self) -> None:
        """Let the modules hold them."""
        for param, smaller in zip(self._params, self._smaller, strict=True):
            param.register(smaller)

    def sync_requires_grad(self) -> None:
        """Notice what was frozen and unfrozen while the modules hold them."""
        for param, smaller in zip(self._params, self._smaller, strict=True):
            param.sync_requires_grad(smaller)


def _spec_of(param: ShardedParam, mesh: ShardMesh) -> DTensorSpec:
    return dtensor.spec_for(mesh.mesh, mesh.placements(Shard(param.dim)), param.size, param.compute_dtype)


def _part_of(param: ShardedParam, mesh: ShardMesh) -> torch.Tensor:
    assert param.unsharded is not None
    start, rows = shard_rows(param.size[param.dim], mesh.size, mesh.rank)
    return param.unsharded.detach().narrow(param.dim, start, rows)


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
