"""The state of a rank process that outlives a case: process groups and meshes, created once and reused."""

from __future__ import annotations

import collections
import contextlib
import pickle
import time
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardproof.harness.adapters.base import Adapter
from shardproof.harness.collectives.announce import Announcer
from shardproof.harness.parity.exchange import Gathers
from shardproof.harness.parity.explainer import Explainer
from shardproof.harness.parity.replay_cache import ReplayCache
from shardproof.harness.tensors import private
from shardproof.harness.tensors.trees import map_tensors
from shardproof.harness.verdicts.finding import Finding, raise_first
from shardproof.harness.verdicts.observations import Observations

# Where the time of a rank goes: each moment of a case counts for one activity, the innermost.


Activity = Literal["case", "sharding", "training", "replaying", "comparing", "waiting", "leftovers"]
"""What a rank does: shard a model, train the sharded run, replay on the baseline and the oracle, compare, wait for the
other ranks in an exchange, look for left-overs; everything else is the case's own."""


class Stopwatch:
    """Measures the activities of one rank, one inside of the other.

    Attributes:
        seconds: the wall time of each activity without the activities inside of it.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a case."""
        self.seconds: collections.Counter[Activity] = collections.Counter()
        self._activity: Activity = "case"
        self._since = time.monotonic()

    @contextlib.contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Count the time of the block for an activity."""
        before = self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def stop(self) -> dict[str, float]:
        """Return the seconds of each activity, rounded to a tenth of a millisecond."""
        self._switch(self._activity)
        return {name: round(value, 4) for name, value in sorted(self.seconds.items())}

    def _switch(self, activity: Activity) -> Activity:
        now, before = time.monotonic(), self._activity
        self.seconds[before] += now - self._since  # type: ignore[assignment]
        self._activity, self._since = activity, now
        return before


def process_groups() -> set[dist.ProcessGroup]:
    """All process groups of this process; none where torch does not tell."""
    world = private.find("torch.distributed.distributed_c10d._world")
    return set() if world is None else set(world.pg_map)


class RankState:
    """One rank process of a world, from its start to its end.

    Args:
        directory: a directory of the world alone.
        nodes: the host of each rank, numbered from 0; by default all are on one.

    Attributes:
        used: the names of the implementations that have run in this process.
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
        """The mesh of :meth:`Rank.mesh` (collective at the first call with these arguments)."""
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


# One rank of a world: its place among the ranks, and how all ranks reach one verdict.


class Member:
    """One rank of a world during one case.

    Every rank of the world must call the methods that are marked as collective.

    Attributes:
        record: what this rank observes during the case, for the run file.
        explainer: looks for the first divergence with capture on; None in an ordinary run.
    """

    def __init__(self, state: RankState, *, implementation: type[Adapter], explainer: Explainer | None = None) -> None:
        self._state = state
        self.explainer = explainer
        self.implementation = implementation
        self.record = Observations()

    @property
    def index(self) -> int:
        """This rank's number, from 0."""
        return self._state.index

    @property
    def world_size(self) -> int:
        """The number of ranks of the world."""
        return self._state.size

    @property
    def nodes(self) -> tuple[int, ...]:
        """The host of each rank, numbered from 0; all are 0 unless torchrun started ranks on several hosts."""
        return self._state.nodes

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors; no two ranks of a world share a CUDA device."""
        return self._state.device

    @property
    def announcer(self) -> Announcer:
        """Announces this rank's collectives on the world's board."""
        return self._state.announcer

    @property
    def replays(self) -> ReplayCache:
        """The results of baselines and oracles that this rank process keeps."""
        return self._state.replays

    @property
    def stopwatch(self) -> Stopwatch:
        """Measures where this rank's time goes."""
        return self._state.stopwatch

    def exchange(self, value: Any) -> list[Any]:
        """Gather one value from every rank, in rank order (collective), outside the trace and every group under test.

        Args:
            value: this rank's value; it must be picklable.
        """
        mine = pickle.dumps(value)
        with self.stopwatch.during("waiting"):
            everyone = self._state.exchange.gather(mine)
        return [pickle.loads(one) for one in everyone]

    def exchange_tensors(self, value: Any) -> list[Any]:
        """Gather one container of tensors from every rank (collective); see :meth:`exchange`.

        Args:
            value: this rank's container, as :func:`map_tensors` handles it.

        Returns:
            One container per rank, in rank order, with all tensors on this rank's device.
        """
        gathered = self.exchange(map_tensors(torch.Tensor.cpu, value))
        moved: list[Any] = map_tensors(lambda tensor: tensor.to(self.device), gathered)
        return moved

    def agree(self, finding: Finding | None, *, title: str) -> None:
        """Raise on every rank if any rank has a finding (collective).

        Args:
            title: the first line of the failure, a statement of what went wrong.

        Raises:
            Divergence: with the same text and location on all ranks, those of the first finding by step, stage and
                rank.
        """
        raise_first(self.exchange(finding), title=title)
