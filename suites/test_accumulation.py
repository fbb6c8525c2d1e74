"""Chapter ACCUMULATION: the gradients of several microbatches, reduced as often as was asked for and no more."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.adapters.base import Accumulation
from shardproof.harness.parity import Pair, Rank
from shardproof.harness.plugin.axes import RESHARD_CHOICES, RESHARD_EXPLICIT

DIM = 9
DEPTH = 3
UNITS = DEPTH + 1  # the root has parameters of its own
MICROBATCHES = 3

PER_UNIT = needs(Capability.DEFERRED_PER_UNIT)
WAITING = pytest.mark.parametrize(
    "waiting",
    [
        "all",
        pytest.param("root-only", marks=PER_UNIT),
        pytest.param(("layers.0", "layers.1"), marks=PER_UNIT, id="some"),
    ],
)
OFFLOADED = needs(Capability.OFFLOAD, Capability.PAGEABLE_OFFLOAD)
#: As the seeds have it, offloading is crossed with one way of resharding.
RESHARD_AND_OFFLOAD = pytest.mark.parametrize(
    ("reshard_after_forward", "offload"),
    [
        *(pytest.param(*item.values, None, marks=item.marks) for item in RESHARD_EXPLICIT),
        pytest.param(True, "pageable", marks=[*RESHARD_CHOICES[0].marks, OFFLOADED]),
    ],
)
COUNTED = needs(Capability.DEFERRED_REDUCTION, Capability.COUNTED_UNITS)
ROOT_TOO = needs(Capability.ROOT_RESHARD)


def reductions(waiting: str | tuple[str, ...]) -> int:
    """How often units are reduced in a step, if these wait for the last microbatch."""
    number = {"all": UNITS, "root-only": 1}[waiting] if isinstance(waiting, str) else len(waiting)
    return UNITS + (UNITS - number) * (MICROBATCHES - 1)


def gathers_of(reshard_after_forward: bool | int | None) -> dict[str, int]:
    """Gathers in forward and in backward, if units are freed after each backward."""
    again = 0 if reshard_after_forward is False else UNITS * MICROBATCHES
    return {"forward": UNITS * MICROBATCHES, "backward": again}


def train_and_count(rank: Rank, gathers: dict[str, int], reduces: dict[str, int], **options: Any) -> None:
    """Three steps beside DDP, which reduces once, after the last microbatch.

    Gradients are zeroed or forgotten in turn, so that they are added to what is there too.
    """
    model = models.Tower(dim=DIM, depth=DEPTH)
    pair = rank.pair(model, units=model.units(), microbatches=MICROBATCHES, **options)
    for step in range(3):
        step_with(rank, pair, step)
        pair.check()
        pair.check_counts("forward", all_gather=gathers["forward"])
        pair.check_counts("backward", all_gather=gathers["backward"], **reduces)
        pair.check_counts("step")


def step_with(rank: Rank, pair: Pair, step: int, *, ahead: int = 0) -> None:
    """One step on microbatches that all differ."""
    batch = [rank.batch(step, (2, DIM), microbatch=number) for number in range(MICROBATCHES)]
    pair.step(batch, set_to_none=step % 2 == 1, ahead=ahead)


@contract("ACCUMULATION-1", "ACCUMULATION-2")
@world(4)
@COUNTED
@ROOT_TOO
@RESHARD_AND_OFFLOAD
@WAITING
def test_reduction_waits(rank: Rank, waiting: Any, reshard_after_forward: bool | int, offload: Any) -> None:
    """Units that wait for the last microbatch are reduced once, the others each time; gathers stay what they are."""
    how = Accumulation(units=waiting)
    train_and_count(
        rank, gathers_of(reshard_after_forward), {"reduce_scatter": reductions(waiting)},
        reshard_after_forward=reshard_after_forward, offload=offload, accumulation=how,
    )  # fmt: skip


@contract("ACCUMULATION-1", "ACCUMULATION-2", "ACCUMULATION-3")
@world(4)
@COUNTED
@ROOT_TOO
@needs(Capability.HYBRID)
@RESHARD_AND_OFFLOAD
@WAITING
@pytest.mark.parametrize(
    "skips", ["reduction", pytest.param("all-reduce", marks=needs(Capability.DEFERRED_ALL_REDUCE))]
)
def test_hybrid_reduction_waits(
    rank: Rank, skips: Any, waiting: Any, reshard_after_forward: bool | int, offload: Any
) -> None:
    """Replicas either reduce nothing before the last microbatch, or within each shard group only."""
    reduces = {"reduce_scatter": reductions(waiting), "all_reduce": reductions(waiting)}
    if skips == "all-reduce":
        reduces["reduce_scatter"] = UNITS * MICROBATCHES
    train_and_count(
        rank, gathers_of(reshard_after_forward), reduces, mesh=rank.mesh((2, 2), ("replicate", "shard")),
        reshard_after_forward=reshard_after_forward, offload=offload,
        accumulation=Accumulation(units=waiting, skips=skips),
    )  # fmt: skip


@contract("ACCUMULATION-1", "ACCUMULATION-2")
@world(2, 4)
@COUNTED
def test_root_keeps_its_own_while_waiting(rank: Rank) -> None:
    """By default the root keeps its own parameters between forward and backward, and the others do not."""
    gathers = {"forward": UNITS * MICROBATCHES, "backward": (UNITS - 1) * MICROBATCHES}
    train_and_count(rank, gathers, {"reduce_scatter": UNITS}, accumulation=Accumulation())


KEPT = pytest.mark.parametrize("waiting", ["all", pytest.param("root-only", marks=PER_UNIT)])


def kept_gathers(waiting: str) -> dict[str, int]:
    """Units that stay gathered after backward are gathered in the first microbatch alone."""
    return {"forward": UNITS if waiting == "all" else UNITS + (UNITS - 1) * (MICROBATCHES - 1), "backward": 0}


@contract("ACCUMULATION-1", "ACCUMULATION-2", "ACCUMULATION-4")
@world(4)
@COUNTED
@needs(Capability.RESHARD_AFTER_FORWARD, Capability.KEEP_AFTER_BACKWARD)
@KEPT
def test_parameters_stay_gathered(rank: Rank, waiting: Any) -> None:
    """Units that neither reduce nor free before the last microbatch are gathered once in a step."""
    train_and_count(
        rank, kept_gathers(waiting), {"reduce_scatter": reductions(waiting)},
        reshard_after_forward=False, accumulation=Accumulation(units=waiting, keeps_gathered=True),
    )  # fmt: skip


@contract("ACCUMULATION-1", "ACCUMULATION-2", "ACCUMULATION-3", "ACCUMULATION-4")
@world(4)
@COUNTED
@needs(Capability.HYBRID, Capability.RESHARD_AFTER_FORWARD, Capability.KEEP_AFTER_BACKWARD)
@KEPT
@pytest.mark.parametrize(
    "skips", ["reduction", pytest.param("all-reduce", marks=needs(Capability.DEFERRED_ALL_REDUCE))]
)
def test_hybrid_parameters_stay_gathered(rank: Rank, skips: Any, waiting: Any) -> None:
    """The same on replicas, whether they reduce within their shard groups or not at all."""
    reduces = {"reduce_scatter": reductions(waiting), "all_reduce": reductions(waiting)}
    if skips == "all-reduce":
        reduces["reduce_scatter"] = UNITS * MICROBATCHES
    train_and_count(
        rank, kept_gathers(waiting), reduces, mesh=rank.mesh((2, 2), ("replicate", "shard")),
        reshard_after_forward=False, accumulation=Accumulation(units=waiting, skips=skips, keeps_gathered=True),
    )  # fmt: skip


@contract("ACCUMULATION-5")
@world(2)
@needs(
    Capability.DEFERRED_REDUCTION,
    Capability.RESHARD_AFTER_FORWARD,
    Capability.MARKED_LAST_BACKWARD,
    Capability.COUNTED_UNITS,
)
@pytest.mark.parametrize("keeps_gathered", [False, pytest.param(True, marks=needs(Capability.KEEP_AFTER_BACKWARD))])
@pytest.mark.parametrize("unshards", [False, pytest.param(True, marks=needs(Capability.ASYNC_UNSHARD))])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_forwards_run_ahead(rank: Rank, ahead: int, unshards: bool, keeps_gathered: bool) -> None:
    """Microbatches in the order of a pipeline's stage, reduced by the backward that is marked as the last.

    Parameters may have been gathered by a call before the first forward, which then gathers nothing.
    """
    model = models.Tower(dim=DIM, depth=DEPTH)
    pair = rank.pair(
        model, units=model.units(), baseline="replicated", microbatches=MICROBATCHES, reshard_after_forward=False,
        accumulation=Accumulation(keeps_gathered=keeps_gathered, marks_last=True),
    )  # fmt: skip
    for step in range(3):
        if unshards:
            with pair.sharded.recorder.during("unshard"):
                pair.adapter.unshard()
        step_with(rank, pair, step, ahead=ahead)
        pair.check()
        # What a backward freed is gathered by what comes next: a forward, or at the end of a pipeline another backward.
        forwards, backwards = (1, 0) if keeps_gathered else (MICROBATCHES - ahead, ahead)
        pair.check_counts("forward", all_gather=UNITS * (forwards - unshards))
        pair.check_counts("backward", all_gather=UNITS * backwards, reduce_scatter=UNITS)
        assert pair.sharded.trace.counts("unshard") == ({"all_gather": UNITS * (step + 1)} if unshards else {})
