"""Which ranks a flat parameter is sharded over, and over which it is replicated."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_impl.flat.options import ShardingStrategy


@dataclass(frozen=True)
class Ranks:
    """The data-parallel ranks and the place of this rank among them.

    Attributes:
        group: the process group that shards lie over; under ``NO_SHARD`` the ranks that hold replicas.
        size: number of shards, 1 under ``NO_SHARD``.
        rank: the shard that this rank holds.
        across: process group of the ranks that hold the same shard, ``None`` if nothing was said about replicas.
        mesh: the device mesh that the groups came from, if they came from one.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    across: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The group of gathers and reduce-scatters, ``None`` if there is nothing to gather."""
        return self.group if self.size > 1 else None

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The group to all-reduce over, ``None`` if there is one of each shard."""
        return self.across if self.replicate_size > 1 else None

    @property
    def replicate_size(self) -> int:
        """How many ranks hold the same shard."""
        return self.across.size() if self.across is not None else 1

    def replicated(self) -> "Ranks":
        """These ranks without sharding: they are replicas of each other."""
        if self.across is not None:
            assert self.group.size() == 1, "shards and replicas at once"
            return self
        return replace(self, size=1, rank=0, across=self.group)


def resolve(
    process_group: Any,
    device_mesh: DeviceMesh | None,
    strategy: ShardingStrategy,
    device_type: str,
    *,
    has_policy: bool,
) -> Ranks:
    """The ranks that the constructor's arguments mean.

    Raises:
        ValueError: if both a process group and a mesh are given, or for hybrid strategies neither of them (or of the
            wrong kind) without a wrapping policy.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."
        )
    if strategy.is_hybrid:
        return _resolve_hybrid(process_group, device_mesh, strategy, device_type, has_policy=has_policy)
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ValueError(f"{strategy} expects a 1D device_mesh but got {device_mesh}")
        group = device_mesh.get_group(mesh_dim=0)
    else:
        group = process_group if process_group is not None else _default_group()
    return Ranks(group, group.size(), group.rank(), mesh=device_mesh)


def _resolve_hybrid(
    process_group: Any,
    device_mesh: DeviceMesh | None,
    strategy: ShardingStrategy,
    device_type: str,
    *,
    has_policy: bool,
) -> Ranks:
    if process_group is None and device_mesh is None and not has_policy:
        # Each unit would make groups of its own.
        raise ValueError(
            f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh."
        )
    if device_mesh is not None:
        if not isinstance(device_mesh, DeviceMesh) or device_mesh.ndim != 2:
            raise ValueError(f"Expected device_mesh to have ndim=2 but got {getattr(device_mesh, 'ndim', device_mesh)}")
        replicas, group = device_mesh.get_group(mesh_dim=0), device_mesh.get_group(mesh_dim=1)
    elif process_group is None:
        group, replicas = _groups_by_host(device_type)
    elif _is_pair_of_groups(process_group):
        group, replicas = process_group
    else:
        raise ValueError(
            "Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, dist.ProcessGroup] "
            f"but got {type(process_group)}"
        )
    return Ranks(group, group.size(), group.rank(), across=replicas, mesh=device_mesh)


def _is_pair_of_groups(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(group, dist.ProcessGroup) for group in value)


def _default_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup | None = dist.group.WORLD
    if group is None:
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
    return group


def _groups_by_host(device_type: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Shards within a host, replicas across hosts; on CPU all ranks count as one host."""
    world = dist.get_world_size()
    per_host = world if device_type == "cpu" else min(world, torch.get_device_module(device_type).device_count())
    group, _ = dist.new_subgroups(per_host)
    replicas: dist.ProcessGroup | None = None
    for first in range(per_host):
        across = dist.new_group(list(range(first, world, per_host)))  # every rank has to take part in each
        if dist.get_rank() % per_host == first:
            replicas = across
    assert replicas is not None
    return group, replicas
