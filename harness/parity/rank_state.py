"""The state of a rank process that outlives a case: process groups and meshes, created once and reused."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardproof.harness.collectives.announce import Announcer
from shardproof.harness.parity.host_exchange import Gathers
from shardproof.harness.parity.replay_cache import ReplayCache
from shardproof.harness.parity.stopwatch import Stopwatch
from shardproof.harness.tensors import private


def process_groups() -> set[dist.ProcessGroup]:
    """All process groups of this process; none where torch does not tell."""
    world = private.find("torch.distributed.distributed_c10d._world")
    return set() if world is None else set(world.pg_map)


class RankState:
    """One rank process of a world, from its start to its end.

    Args:
        index: the global rank.
        size: the number of ranks of the world.
        device: the device of this rank's tensors.
        directory: a directory of the world alone.
        exchange: this rank's part in the harness's exchanges.
        announcer: announces this rank's collectives on the world's board.
        nodes: the host of each rank, numbered from 0; by default all are on one.

    Attributes:
        used: the names of the implementations that have run in this process.
        stopwatch: measures where the time of a case goes.
        replays: the results of baselines and oracles that later cases may need again.
    """

    def __init__(
        self,
        *,
        index: int,
        size: int,
        device: torch.device,
        directory: str,
        exchange: Gathers,
        announcer: Announcer,
        nodes: tuple[int, ...] = (),
    ) -> None:
        self.index = index
        self.size = size
        self.device = device
        self.directory = directory
        self.exchange = exchange
        self.announcer = announcer
        self.nodes = nodes or (0,) * size
        self.used: set[str] = set()
        self.replays = ReplayCache()
        self.stopwatch = Stopwatch()
        self._groups = {group: str(group.group_name) for group in process_groups()}
        self._meshes: dict[tuple[object, ...], DeviceMesh] = {}

    def mesh(
        self,
        shape: tuple[int, ...],
        names: tuple[str, ...],
        order: tuple[int, ...] | None = None,
        joined: tuple[str, ...] = (),
    ) -> DeviceMesh:
        """The mesh of this shape over all ranks (collective at the first call with these arguments).

        Args:
            shape: the size of each dimension.
            names: the name of each dimension.
            order: the ranks, as they fill the mesh; by default in rank order.
            joined: dimensions that are one besides, whose name has theirs with underscores between.
        """
        key = (shape, names, order, joined)
        if key not in self._meshes:
            before = process_groups()
            if order is None:
                self._meshes[key] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
            else:
                ranks = torch.tensor(order).view(shape)
                self._meshes[key] = DeviceMesh(self.device.type, ranks, mesh_dim_names=names)
            if joined:
                self._meshes[key][joined]._flatten("_".join(joined))
            self._groups |= {group: str(group.group_name) for group in process_groups() - before}
        return self._meshes[key]

    def foreign_groups(self) -> set[dist.ProcessGroup]:
        """The process groups that neither the harness nor its meshes created."""
        return process_groups() - self._groups.keys()

    def lost_groups(self) -> list[str]:
        """The names of the process groups of the harness and its meshes that no longer exist."""
        existing = process_groups()
        return [name for group, name in self._groups.items() if group not in existing]
