"""From flat shards to parameters whole or sharded along their first dimension, and back."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from fsdp_impl.common import dtensor
from fsdp_impl.common.layout import shard_rows
from fsdp_impl.common.mesh import concatenate
from fsdp_impl.flat.group import FlatGroup


def whole_values(group: FlatGroup, shard: torch.Tensor) -> list[torch.Tensor]:
    """The parameters, or what is laid out like them, of which ``shard`` is this rank's part. Collective.

    They are views of memory that may be the shard's own; DTensors where the parameters are.
    """
    shard = shard.detach()
    sharded = group.shards.is_sharded or shard.device != group.device
    return group.views(group.gather_full(shard) if sharded else shard)


def full(value: torch.Tensor) -> torch.Tensor:
    """A whole copy of a value of :func:`whole_values`. Collective over the mesh of a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()


def full_size(group: FlatGroup, index: int) -> torch.Size:
    """The shape of parameter ``index`` when nothing has cut it."""
    spec = group.shards.specs[index]
    return group.shards.layout.pieces[index].size if spec is None else dtensor.meta_of(spec).shape


def sharded(group: FlatGroup, index: int, value: torch.Tensor) -> DTensor:
    """A value of :func:`whole_values` as a DTensor, of which this rank has a copy of its rows.

    Over the data-parallel mesh (replicas first), and behind it the mesh that the parameter is a DTensor of.

    Raises:
        ValueError: for DTensor parameters over a process group without a mesh.
    """
    ranks, spec = group.ranks, group.shards.specs[index]
    local = dtensor.local_of(value) if isinstance(value, DTensor) else value
    start, rows = shard_rows(local.size(0), ranks.size, ranks.rank)
    mesh = ranks.mesh
    if mesh is None:
        if spec is not None:
            raise ValueError("Sharded state dicts of DTensor parameters need a device_mesh, not a process group")
        mesh = DeviceMesh.from_group(ranks.group, group.device.type)
    placements: list[Placement] = [Replicate()] * mesh.ndim
    behind: Sequence[Placement] = () if spec is None else spec.placements
    if ranks.size > 1:
        placements[-1] = _rows(mesh, behind, spec.mesh if spec is not None else None)
    if spec is not None:
        mesh = concatenate([mesh, spec.mesh])
    whole_spec = dtensor.spec_for(mesh, [*placements, *behind], full_size(group, index), value.dtype)
    return dtensor.wrap(local.detach().narrow(0, start, rows).clone(memory_format=torch.contiguous_format), whole_spec)


def _rows(mesh: DeviceMesh, behind: Sequence[Placement], other: DeviceMesh | None) -> Placement:
    """Rows of what the dimensions ``behind`` have cut already."""
    pieces = 1
    for dim, placement in enumerate(behind):
        if isinstance(placement, Shard) and placement.dim == 0 and other is not None:
            pieces *= other.size(dim)
    return _StridedShard(0, split_factor=pieces) if pieces > 1 else Shard(0)


def local_part(group: FlatGroup, index: int, whole: torch.Tensor) -> torch.Tensor:
    """What of a ``whole`` tensor the unsharded parameter ``index`` has on this rank: all, unless it is a DTensor."""
    spec = group.shards.specs[index]
    if spec is None:
        return whole
    size, offset = compute_local_shape_and_global_offset(whole.shape, spec.mesh, spec.placements)
    for dim, (length, first) in enumerate(zip(size, offset, strict=True)):
        whole = whole.narrow(dim, min(first, whole.size(dim)), length)
    return whole


@torch.no_grad()
def write(group: FlatGroup, index: int, local: torch.Tensor) -> None:
    """Copy this rank's part of parameter ``index`` to the shard."""
    group.shards.put(index, local, group.shards.flat.detach())
