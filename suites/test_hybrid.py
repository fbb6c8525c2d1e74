"""Chapter HYBRID: parameters sharded within replicas, gradients averaged over all ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.adapters.base import Accumulation
from shardproof.harness.models.recomputation import recompute
from shardproof.harness.parity import Rank
from shardproof.harness.plugin.axes import RESHARD_CHOICES

NAMES = ("replicate", "shard")
DEFERRED = needs(Capability.DEFERRED_REDUCTION)
#: (replicate, shard) sizes on four ranks; the second shards nothing.
SHAPES = pytest.mark.parametrize(
    "shape", [(2, 2), pytest.param((4, 1), marks=needs(Capability.SINGLE_RANK))], ids=["2x2", "4x1"]
)

pytestmark = needs(Capability.HYBRID)


@contract("HYBRID-1")
@world(4)
@needs(Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("reshard_after_forward", [False, True])
@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=needs(Capability.RECOMPUTATION))])
@pytest.mark.parametrize("dim", [3, 16, 17])
@pytest.mark.parametrize("waits", [pytest.param(True, marks=DEFERRED), False])
def test_replicas(rank: Rank, waits: bool, dim: int, recomputes: bool, reshard_after_forward: bool | None) -> None:
    """Replicas train as DDP over all ranks, whether they reduce each microbatch or their sum."""
    model = models.NormedStack(dim)
    microbatches = 3
    pair = rank.pair(
        model,
        units=[["norm"], *model.units()],
        mesh=rank.mesh((2, 2), NAMES),
        reshard_after_forward=reshard_after_forward,
        microbatches=microbatches,
        accumulation=Accumulation() if waits else None,
        prepare=functools.partial(recompute, means="hooks") if recomputes else None,
    )
    for step in range(3):
        batch = [rank.batch(step, (8, dim), microbatch=number) for number in range(microbatches)]
        pair.step(batch, set_to_none=step % 2 == 0)
        pair.check()


@contract("HYBRID-1")
@world(8)
@needs(Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("reshard_after_forward", [False, True])
@pytest.mark.parametrize("dim", [3, 17])
@pytest.mark.parametrize("shape", [(2, 4), (4, 2)], ids=["2x4", "4x2"])
def test_replicas_of_eight(rank: Rank, shape: tuple[int, int], dim: int, reshard_after_forward: bool | None) -> None:
    """The same where there are not as many replicas as shards, so that one cannot stand for the other."""
    model = models.NormedStack(dim)
    pair = rank.pair(
        model,
        units=[["norm"], *model.units()],
        mesh=rank.mesh(shape, NAMES),
        reshard_after_forward=reshard_after_forward,
    )
    for step in range(3):
        pair.step(rank.batch(step, (8, dim)), set_to_none=step % 2 == 0)
        pair.check()


@contract("HYBRID-2")
@world(4)
@needs(Capability.COUNTED_UNITS)
@SHAPES
@pytest.mark.parametrize(
    "reshard_after_forward",
    [None, pytest.param(True, marks=[*RESHARD_CHOICES[0].marks, needs(Capability.ROOT_RESHARD)]), RESHARD_CHOICES[1]],
)
def test_counts(rank: Rank, reshard_after_forward: Any, shape: tuple[int, int]) -> None:
    """Each unit is gathered and reduced within its replica, unless that is one rank, and then over the replicas."""
    model = models.Tower(dim=9)
    units = len(model.units()) + 1
    pair = rank.pair(
        model, units=model.units(), mesh=rank.mesh(shape, NAMES), reshard_after_forward=reshard_after_forward
    )
    again = {None: units - 1, False: 0}.get(reshard_after_forward, units)
    for step in range(2):
        pair.step(rank.batch(step, (4, 9)))
        pair.check()
        shards = shape[1] > 1
        pair.check_counts("forward", all_gather=units * shards)
        pair.check_counts("backward", all_gather=again * shards, reduce_scatter=units * shards, all_reduce=units)
        for item in pair.last_trace():
            over = shape[0] if item.kind == "all_reduce" else shape[1]
            assert len(item.group) == over, f"{item} on a mesh of {shape[0]} replicas of {shape[1]} shards"
