"""Chapter MEMORY: the memory in which units are gathered while a step runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardproof.harness import Capability, Hardware, alone, contract, models, needs, world
from shardproof.harness.findings.finding import step_label
from shardproof.harness.models import busy, optim
from shardproof.harness.parity import Census, Rank
from shardproof.harness.parity.units import ROOT
from shardproof.harness.plugin.axes import RESHARD, RESHARD_FREES
from shardproof.harness.tensors import memory

DEPTH = 5
#: On a device the bytes of a unit may go back once the work that reads them has run: those of so many units at most.
BEHIND = 2
LAYERS = [f"layers.{index}" for index in range(DEPTH)]

pytestmark = needs(Capability.SHARDED)


@contract("MEMORY-1")
@world(2, 4)
@needs(Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("reshard_after_forward", RESHARD_FREES)
def test_units_are_freed_behind_the_computation(rank: Rank, reshard_after_forward: bool | int) -> None:
    """When a unit begins, in forward and in backward, the units that are done with hold no gathered bytes."""
    model = models.Tower(dim=9, depth=DEPTH)
    full = {
        f"layers.{index}": 4 * sum(p.numel() for p in layer.parameters()) for index, layer in enumerate(model.layers)
    }
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    census = Census(pair.sharded)
    for step in range(2):
        census.moments.clear()
        pair.step(rank.batch(step, (4, 9)))
        order = {"forward": [*LAYERS, ROOT], "backward": [ROOT, *LAYERS[::-1]]}
        for phase, units in order.items():
            moments = [moment for moment in census.moments if moment.phase == phase]
            assert [moment.unit for moment in moments] == units, f"units that began their {phase}: {moments}"
            for number, moment in enumerate(moments):
                # Resharded to a part of the ranks, a unit may hold that part until backward needs it.
                allowed = 0 if reshard_after_forward is True or phase == "backward" else 0.75
                kept = {
                    unit: moment.held[unit]
                    for unit in units[:number]
                    if unit != ROOT and moment.held.get(unit, 0) > allowed * full[unit]
                }
                assert len(kept) <= (0 if rank.device.type == "cpu" else BEHIND), (
                    f"when the {phase} of {moment.unit} begins in {step_label(step)}, these units are done with and "
                    f"still gathered (bytes): {kept}"
                )
        if rank.device.type == "cpu":
            assert not census.held(), f"after {step_label(step)} units are gathered (bytes): {census.held()}"
        pair.check()


@contract("MEMORY-3")
@world(2, 4)
@needs(Capability.UNUSED_OUTPUT)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_everything_is_freed_when_backward_ends(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """When backward ends nothing is gathered, not even units that ran and got no gradient, and no call helps."""
    seen: list[dict[str, int]] = []
    census: Census
    pair = rank.pair(
        models.TwoHeads(dim=25),
        units=[["head0"], ["head1"]],
        baseline="replicated",
        reshard_after_forward=reshard_after_forward,
        find_unused=True,
        after_backward=lambda adapter: seen.append(census.held()),
    )
    census = Census(pair.sharded)
    for step, loss in enumerate([models.both_heads, models.first_head, models.both_heads, models.first_head]):
        pair.step(rank.batch(step, (2, 25)), loss=loss)
    pair.check()
    for step, held in enumerate(seen):
        allowed = 0 if rank.device.type == "cpu" else BEHIND
        assert len(held) <= allowed, (
            f"when the backward of {step_label(step)} has ended, units are gathered (bytes): {held}"
        )
    assert len(seen) == 4


#: A layer's bytes: large enough that what libraries and the allocator keep for themselves does not count.
WIDTH = 1024
LAYER = 4 * WIDTH * WIDTH
#: Small beside a layer: activations, the scalars of the loss, the optimizer's.
CRUMBS = LAYER // 8


@contract("MEMORY-2", "MEMORY-5")
@world(2)
@alone()
@needs(Hardware.ACCELERATOR, Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("mesh", ["shards", pytest.param("replicas", marks=needs(Capability.SINGLE_RANK))])
def test_peaks(rank: Rank, mesh: str) -> None:
    """What forward and backward add to the memory that is held is bounded, however many units there are."""
    shape = {"shards": (1, rank.world_size), "replicas": (rank.world_size, 1)}[mesh]
    options: dict[str, Any] = {"mesh": rank.mesh(shape, ("replicate", "shard"))} if mesh == "replicas" else {}
    for depth in (4, 12):
        held, peaks = _memory_of_a_step(rank, depth, **options)
        share = depth * LAYER // shape[1]
        assert held <= 3 * share + CRUMBS, (
            f"between steps {depth} layers hold {held / share:.2f} times a rank's share of the parameters; parameters, "
            "momentum and gradients make 3"
        )
        for phase, allowed in IN_WHOLE.items():
            # Gradients that a step had set to None are allocated anew.
            most = allowed * LAYER + (share if phase == "backward" else 0)
            assert peaks[phase] <= most + CRUMBS, (
                f"{phase} of {depth} layers adds {peaks[phase] / LAYER:.2f} layers; {most / LAYER:.2f} are allowed"
            )


#: How many units a phase may hold in whole. In forward: the one that computes, and the next one in the memory of the
#: gather and in that of its parameters. In backward their gradients besides, and the input of a reduction in flight.
IN_WHOLE = {"forward": 3, "backward": 6}


def _memory_of_a_step(rank: Rank, depth: int, **options: Any) -> tuple[int, dict[str, int]]:
    """The bytes that a model holds before its third step, and what forward and backward then add at most."""
    model = busy.EqualLayers(WIDTH, depth).to(rank.device)
    without = memory.held_bytes(rank.device) - memory.bytes_of(model.parameters())
    options |= {"reshard_after_forward": True, "optimizer": optim.sgd(), "pictures": False}
    run = rank.run(model, units=model.units(), **options)
    del model
    marks: list[int] = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        marks.append(memory.peak_bytes(rank.device))
        memory.forget_peak(rank.device)
        return models.mean_square(output)

    for step in range(3):
        batch = rank.batch(step, (1, WIDTH))
        held = memory.held_bytes(rank.device)
        marks.clear()
        memory.forget_peak(rank.device)
        run.forward_backward((batch,), loss=loss)
        marks.append(memory.peak_bytes(rank.device))
        run.adapter.step()
        run.adapter.zero_grad(set_to_none=True)
    return held - without, dict(zip(IN_WHOLE, (mark - held for mark in marks), strict=True))
