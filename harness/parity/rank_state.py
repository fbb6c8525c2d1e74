"""What outlives a case in a rank process: groups, meshes and results of replays; and its rank of a world meanwhile."""

import collections
import contextlib
import dataclasses
import pickle
import time
from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardproof.harness.adapters.base import Adapter
from shardproof.harness.collectives.announce import Announcer
from shardproof.harness.judging.finding import Finding, raise_first
from shardproof.harness.judging.observations import Observations
from shardproof.harness.parity.course import Course
from shardproof.harness.parity.exchange import Gathers
from shardproof.harness.parity.explainer import Explainer
from shardproof.harness.tensors import private
from shardproof.harness.tensors.memory import raw_bytes
from shardproof.harness.tensors.trees import map_leaves, map_tensors, tensors_of

# Where the time of a rank goes: each moment of a case counts for one activity, the innermost.

Activity = Literal["case", "sharding", "training", "replaying", "comparing", "waiting", "leftovers"]
"""What a rank does: shard a model, train the sharded run, replay on the baseline and the oracle, compare, wait for the
other ranks in an exchange, look for left-overs; everything else is the case's own."""


class Stopwatch:
    """Measures the activities of one rank, one inside of the other.

    ``seconds`` has the wall time of each activity without the activities inside of it.
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


# Results of the baseline and the oracle that a rank process keeps for later cases.
#
# Cases that differ only in how a model is sharded, and the implementations of one run, have the same baseline and the
# same oracle. A result is kept as bytes, so that no case can change it and no census of tensors counts it.

#: The bytes of the results that a rank keeps; the least recently used are dropped first.
_MOST_BYTES = 64 << 20

#: One in so many results that are found is computed again and compared.
_RECOMPUTED = 20

_ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the bytes of a packed result."""

    start: int
    stop: int
    shape: torch.Size
    dtype: torch.dtype


class Packed:
    """An immutable copy of a container of plain tensors without gradients, as :func:`map_tensors` handles it."""

    def __init__(self, value: Any) -> None:
        parts: list[bytes] = []
        self.size = 0

        def pack(tensor: torch.Tensor) -> Any:
            data = raw_bytes(tensor)
            padding = bytes(-len(data) % _ALIGNMENT)
            place = _Place(self.size, self.size + len(data), tensor.shape, tensor.dtype)
            parts.extend((data, padding))
            self.size += len(data) + len(padding)
            return place

        self._skeleton = map_tensors(pack, value)
        self._data = b"".join(parts)

    def unpack(self) -> Any:
        """Return a new copy of the container, with all tensors on the host."""
        data = torch.frombuffer(bytearray(self._data or b"\0"), dtype=torch.uint8)

        def unpack(place: _Place) -> torch.Tensor:
            return data[place.start : place.stop].view(place.dtype).view(place.shape)

        return map_leaves(unpack, self._skeleton, kind=_Place)


class ReplayCache:
    """Packed results by key, the same on every rank of a world as long as their versions are equal.

    ``version`` is the number of results that were ever put in.
    """

    def __init__(self) -> None:
        self.version = 0
        self._results: collections.OrderedDict[bytes, Packed] = collections.OrderedDict()
        self._bytes = 0
        self._found = 0

    def get(self, key: bytes) -> Packed | None:
        """Return the result of a key, or None."""
        if (found := self._results.get(key)) is not None:
            self._results.move_to_end(key)
            self._found += 1
        return found

    @property
    def is_due(self) -> bool:
        """Whether the result that was found last is to be computed again and compared."""
        return self._found % _RECOMPUTED == 0

    def put(self, key: bytes, result: Any) -> None:
        """Keep a result; drop the least recently used ones if there are too many bytes."""
        packed = Packed(result)
        self.version += 1
        self._results[key] = packed
        self._bytes += packed.size
        while self._bytes > _MOST_BYTES:
            self._bytes -= self._results.popitem(last=False)[1].size

    def clear(self, *, version: int) -> None:
        """Drop all results, and continue with a version."""
        self._results.clear()
        self._bytes, self.version = 0, version


def is_equal(one: Any, other: Any) -> bool:
    """Whether two containers have the same tensors, bit for bit."""
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(first.dtype == second.dtype and raw_bytes(first) == raw_bytes(second) for first, second in pairs)


def process_groups() -> set[dist.ProcessGroup]:
    """All process groups of this process; none where torch does not tell."""
    world = private.find("torch.distributed.distributed_c10d._world")
    return set() if world is None else set(world.pg_map)


@dataclasses.dataclass(kw_only=True, eq=False)
class RankState:
    """One rank process of a world, from its start to its end."""

    index: int
    size: int
    device: torch.device
    directory: str
    exchange: Gathers
    announcer: Announcer
    nodes: tuple[int, ...]  # the host of each rank, numbered from 0
    # The names of the implementations that have run in this process.
    used: set[str] = dataclasses.field(default_factory=set)
    # The results of baselines and oracles that later cases may need again.
    replays: ReplayCache = dataclasses.field(default_factory=ReplayCache)
    stopwatch: Stopwatch = dataclasses.field(default_factory=Stopwatch)

    def __post_init__(self) -> None:
        self._groups = {group: str(group.group_name) for group in process_groups()}
        self._meshes: dict[tuple[object, ...], DeviceMesh] = {}

    def mesh(
        self,
        shape: tuple[int, ...],
        names: tuple[str, ...],
        order: tuple[int, ...] | None = None,
        joined: tuple[str, ...] = (),
        keeps: str = "sorted",
    ) -> DeviceMesh:
        """The mesh of :meth:`Rank.mesh` (collective at the first call with these arguments)."""
        key = (shape, names, order, joined, keeps)
        if key not in self._meshes:
            before = process_groups()
            if order is None:
                self._meshes[key] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
            else:
                ranks = torch.tensor(order).view(shape)
                self._meshes[key] = _ordered(self.device.type, ranks, names, keeps)
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


def _ordered(kind: str, ranks: torch.Tensor, names: tuple[str, ...], keeps: str) -> DeviceMesh:
    """A mesh of ``ranks`` in their order, which its groups have too if ``keeps`` is not "sorted"."""
    if keeps != "groups":
        options: dict[str, Any] = {"preserve_rank_order": True} if keeps == "mesh" else {}
        return DeviceMesh(kind, ranks, mesh_dim_names=names, **options)
    groups = []
    for dim in range(ranks.ndim):
        rows = ranks.movedim(dim, -1).reshape(-1, ranks.size(dim)).tolist()
        made = {tuple(row): dist.new_group(row, sort_ranks=False) for row in rows}
        groups += [group for row, group in made.items() if dist.get_rank() in row]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], kind, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=names)


# One rank of a world: its place among the ranks, and how all ranks reach one verdict.


class Member:
    """One rank of a world during one case.

    Every rank of the world must call the methods that are marked as collective.

    Attributes:
        index: this rank's number, from 0.
        world_size: the number of ranks of the world.
        nodes: the host of each rank, numbered from 0; all are 0 unless torchrun started ranks on several hosts.
        device: the device of this rank's tensors; only ``--ranks-per-gpu`` lets two ranks of a world share one.
        announcer: announces this rank's collectives on the world's board.
        replays: the results of baselines and oracles that this rank process keeps.
        stopwatch: measures where this rank's time goes.
        record: what this rank observes during the case, for the run file.
        explainer: looks for the first divergence with capture on; None in an ordinary run.
        courses: the calls of the trainings of this case.
    """

    def __init__(self, state: RankState, *, implementation: type[Adapter], explainer: Explainer | None = None) -> None:
        self._state = state
        self.index, self.world_size, self.nodes, self.device = state.index, state.size, state.nodes, state.device
        self.announcer, self.replays, self.stopwatch = state.announcer, state.replays, state.stopwatch
        self.explainer = explainer
        self.implementation = implementation
        self.record = Observations()
        self.courses: list[Course] = []

    def exchange(self, value: Any) -> list[Any]:
        """Gather one picklable value from every rank, in rank order (collective), outside the trace and all groups."""
        mine = pickle.dumps(value)
        with self.stopwatch.during("waiting"):
            everyone = self._state.exchange.gather(mine)
        return [pickle.loads(one) for one in everyone]

    def exchange_tensors(self, value: Any) -> list[Any]:
        """Gather one container of tensors from every rank, on this rank's device (collective); see :meth:`exchange`."""
        gathered = self.exchange(map_tensors(torch.Tensor.cpu, value))
        return cast(list[Any], map_tensors(lambda tensor: tensor.to(self.device), gathered))

    def agree(self, finding: Finding | None, *, title: str) -> None:
        """Raise on every rank if any rank has a finding (collective); the title states what went wrong.

        The Divergence has the same text and location on all ranks, those of the first finding by step, stage and rank.
        """
        raise_first(self.exchange(finding), title=title)
