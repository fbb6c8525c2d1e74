"""Chapter HYBRID: parameters sharded within replicas, gradients averaged over all ranks."""

from typing import Any

import pytest
from torch import nn

from shardproof.testing import Capability, Rank, contract, models, needs, world
from shardproof.testing.axes import REPLICAS, RESHARD_CHOICES, with_first
from shardproof.testing.make import Accumulation, Clip, tower
from shardproof.testing.measure import Trace
from shardproof.testing.train import Computations, batches, checked_steps, recompute, train_and_check

NAMES = ("replicate", "shard")
DEFERRED = needs(Capability.DEFERRED_REDUCTION)
DEFAULT = pytest.param(None)
FOUR_REPLICAS = pytest.param((4, 1), marks=needs(Capability.SINGLE_RANK))

pytestmark = [needs(Capability.HYBRID), world(4)]


@contract("HYBRID-1")
@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=needs(Capability.RECOMPUTATION))])
@pytest.mark.parametrize(
    ("dim", "reshard_after_forward"),
    [*with_first(3, RESHARD_CHOICES), *with_first(16, RESHARD_CHOICES), *with_first(17, [DEFAULT, *RESHARD_CHOICES])],
)
@pytest.mark.parametrize("waits", [pytest.param(True, marks=DEFERRED), False])
def test_replicas(rank: Rank, waits: bool, dim: int, recomputes: bool, reshard_after_forward: bool | None) -> None:
    """Replicas train as DDP over all ranks, whether they reduce each microbatch's gradients or their sum."""
    model = models.NormedStack(dim)
    microbatches = 3
    computations = Computations(inside="in_proj")

    def prepare(plain: nn.Module) -> nn.Module:
        return recompute(computations.watch(plain), means="hooks")

    options: Any = {"units": [["norm"], *model.units()], "reshard_after_forward": reshard_after_forward}
    options |= {"microbatches": microbatches, "accumulation": Accumulation() if waits else None}
    pair = rank.pair(model, mesh=rank.mesh((2, 2), NAMES), prepare=prepare if recomputes else None, **options)
    for step, batch in enumerate(batches(rank, 3, (8, dim), microbatches=microbatches)):
        pair.step(batch, before_loss=computations.before_loss, set_to_none=step % 2 == 0)
        if recomputes:
            computations.check(times=microbatches)
        pair.check()


@contract("HYBRID-2")
@DEFERRED
@needs(Capability.COUNTED_UNITS)
def test_gathers_while_reductions_wait(rank: Rank) -> None:
    """Microbatches that reduce nothing free and gather as others do, and the last one reduces every unit once."""
    microbatches = 2
    pair = tower(rank, mesh=rank.mesh((2, 2), NAMES), microbatches=microbatches, accumulation=Accumulation())
    units = len(pair.units)
    for _ in checked_steps(pair, batches(rank, 2, (4, 9), microbatches=microbatches)):
        pair.check_counts("forward", all_gather=units * microbatches)
        again = (units - 1) * microbatches
        pair.check_counts("backward", all_gather=again, reduce_scatter=units, all_reduce=units)


@contract("HYBRID-1")
@pytest.mark.parametrize("shape", [(1, 4), FOUR_REPLICAS], ids=["1x4", "4x1"])
def test_one_replica_and_one_shard(rank: Rank, shape: tuple[int, int]) -> None:
    """One replica of four shards, and four replicas of one, train as DDP over all ranks."""
    pair = tower(rank, mesh=rank.mesh(shape, NAMES), microbatches=2)
    train_and_check(pair, batches(rank, 3, (4, 9), microbatches=2), set_to_none="even")


@contract("HYBRID-1")
@world(8)
@pytest.mark.parametrize("reshard_after_forward", [DEFAULT, *RESHARD_CHOICES])
@pytest.mark.parametrize("dim", [3, 17])
@pytest.mark.parametrize("shape", [(2, 4), (4, 2)], ids=["2x4", "4x2"])
def test_replicas_of_eight(rank: Rank, shape: tuple[int, int], dim: int, reshard_after_forward: bool | None) -> None:
    """Unequal numbers of replicas and shards, which cannot be confused, train as DDP over all ranks."""
    model = models.NormedStack(dim)
    options: Any = {"units": [["norm"], *model.units()], "reshard_after_forward": reshard_after_forward}
    pair = rank.pair(model, mesh=rank.mesh(shape, NAMES), **options)
    train_and_check(pair, batches(rank, 3, (8, dim)), set_to_none="even")


@contract("HYBRID-2")
@needs(Capability.COUNTED_UNITS)
@REPLICAS
@pytest.mark.parametrize(
    "reshard_after_forward",
    [None, pytest.param(True, marks=[*RESHARD_CHOICES[0].marks, needs(Capability.ROOT_RESHARD)]), RESHARD_CHOICES[1]],
)
def test_counts(rank: Rank, reshard_after_forward: Any, shape: tuple[int, int]) -> None:
    """Each unit is gathered and reduced within its replica, unless that is one rank, and then over the replicas."""
    pair = tower(rank, mesh=rank.mesh(shape, NAMES), reshard_after_forward=reshard_after_forward)
    mesh, units = pair.adapter.config.mesh, len(pair.units)
    replicas, replica = (tuple(mesh[name].mesh.tolist()) for name in NAMES)
    again = {None: units - 1, False: 0}.get(reshard_after_forward, units)
    for _ in checked_steps(pair, batches(rank, 2, (4, 9))):
        shards = shape[1] > 1
        pair.check_counts("forward", all_gather=units * shards)
        pair.check_counts("backward", all_gather=again * shards, reduce_scatter=units * shards, all_reduce=units)
        pair.check_bytes()
        for item in pair.last_trace():
            expected = replicas if item.kind == "all_reduce" else replica
            assert item.group == expected, f"{item}: its ranks should be {expected}"
            assert item.dtype == "float32", f"{item}: its dtype should be that of the parameters, float32"
        if shards:
            _assert_all_reduces_follow(pair.last_trace(), shape[1])


def _assert_all_reduces_follow(trace: Trace, shards: int) -> None:
    """Each reduce-scatter is followed by the all-reduce of its output, before the next unit's all-reduce."""
    scattered = [item for item in trace if item.kind == "reduce_scatter"]
    summed = [item for item in trace if item.kind == "all_reduce"]
    for first, second in zip(scattered, summed, strict=True):
        assert second.nbytes * shards == first.nbytes, f"[{second}] is not the all-reduce of the output of [{first}]"
        assert trace.index(first) < trace.index(second), f"[{second}] comes before [{first}]"


@contract("HYBRID-3")
@world(8)
@needs(Capability.COUNTED_UNITS, Capability.RESHARD_TO_SIZE, Capability.ROOT_RESHARD)
def test_resharded_within_a_replica(rank: Rank) -> None:
    """Resharded to groups of two of the four ranks of a replica, backward gathers within those two."""
    pair = tower(rank, mesh=rank.mesh((2, 4), NAMES), reshard_after_forward=2)
    first = rank.index - rank.index % 2
    for _ in checked_steps(pair, batches(rank, 2, (4, 9))):
        for item in pair.last_trace():
            gathers_again = (item.phase, item.kind) == ("backward", "all_gather")
            assert not gathers_again or item.group == (first, first + 1), f"{item}: its ranks should be neighbours"


@contract("HYBRID-4")
@pytest.mark.parametrize("clips", [False, pytest.param(True, marks=needs(Capability.CLIPPING))])
@pytest.mark.parametrize("reshard_after_forward", [DEFAULT, *RESHARD_CHOICES])
@pytest.mark.parametrize("declared", [(0, 0, 1, 1), (0, 1, 0, 1)], ids=["blocks", "cyclic"])
def test_bytes_between_hosts(
    rank: Rank, declared: tuple[int, ...], reshard_after_forward: bool | None, clips: bool
) -> None:
    """With each replica on one host, hosts communicate by all-reduces only, with one rank of each host."""
    nodes = rank.nodes_or(declared)
    hosts = len(set(nodes))
    mesh = rank.mesh((hosts, rank.world_size // hosts), NAMES, order=_by_host(nodes))
    clip = Clip(max_norm=0.01) if clips else None
    pair = tower(rank, mesh=mesh, reshard_after_forward=reshard_after_forward, clip=clip)
    for _ in checked_steps(pair, batches(rank, 2, (4, 9))):
        crossing = [item for item in pair.last_trace() if len({nodes[index] for index in item.group}) > 1]
        for item in crossing:
            met = sorted(nodes[index] for index in item.group)
            assert item.kind == "all_reduce", f"{item}: it crosses hosts, {met}, where each replica is on one"
            assert len(set(met)) == len(met), f"{item}: one rank of each host should take part, not {met}"
            assert item.phase != "clip" or item.nbytes <= 8, f"{item}: clipping needs one number from other hosts"
        assert {item.phase for item in crossing} - {"clip"} == {"backward"}, "gradients are averaged over all hosts"


def _by_host(nodes: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks, those of one host after another."""
    return tuple(sorted(range(len(nodes)), key=lambda index: (nodes[index], index)))


@contract("HYBRID-5")
@needs(Capability.COUNTED_UNITS, Capability.RESHARD_TO_SIZE, Capability.ROOT_RESHARD)
@pytest.mark.parametrize("declared", [(0, 0, 1, 1), (0, 1, 0, 1)], ids=["blocks", "cyclic"])
def test_resharded_within_a_host(rank: Rank, declared: tuple[int, ...]) -> None:
    """Sharded over all hosts and resharded to the ranks of one host, backward gathers within a host."""
    nodes = rank.nodes_or(declared)
    here = tuple(index for index, node in enumerate(nodes) if node == nodes[rank.index])
    mesh = rank.mesh((rank.world_size,), order=_by_host(nodes))
    pair = tower(rank, mesh=mesh, reshard_after_forward=len(here))
    for _ in checked_steps(pair, batches(rank, 2, (4, 9))):
        pair.check_counts("backward", all_gather=len(pair.units), reduce_scatter=len(pair.units))
        for item in pair.last_trace():
            if (item.phase, item.kind) == ("backward", "all_gather"):
                assert item.group == here, f"{item}: its ranks should be those of this host, {here}"


@contract("HYBRID-6")
@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ((2, 2), "dp_cp"),
        pytest.param((2, 1, 2), ("replicate", "dp_cp"), marks=needs(Capability.HYBRID)),
        pytest.param((2, 2, 1), ("replicate", "dp_cp"), marks=needs(Capability.HYBRID)),
    ],
    ids=["shards", "replicas-of-context-parts", "replicas"],
)
def test_joined_dimensions(rank: Rank, shape: tuple[int, ...], data: Any) -> None:
    """Two dimensions that user code has flattened into one, as for data and context, shard and average over both."""
    names = ("replicate", "dp", "cp")[-len(shape) :]
    mesh = rank.mesh(shape, names, joined=("dp", "cp"))
    pair = tower(rank, mesh=mesh[data])
    train_and_check(pair, batches(rank, 2, (4, 9)), set_to_none="even")
