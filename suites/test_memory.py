"""Chapter MEMORY: the memory in which units are gathered while a step runs."""

from __future__ import annotations

import pytest

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.findings.finding import step_label
from shardproof.harness.parity import Census, Rank
from shardproof.harness.parity.units import ROOT
from shardproof.harness.plugin.axes import RESHARD, RESHARD_FREES

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
