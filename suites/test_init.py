"""Chapter INIT: how a sharded model comes to be."""

from __future__ import annotations

import pytest

from shardproof.harness import Capability, contract, needs, world
from shardproof.harness.models import shapes
from shardproof.harness.parity import Rank
from shardproof.harness.plugin.axes import RESHARD, RESHARD_ROOT


@contract("INIT-9")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_nested_units(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Units within units, three deep, train as DDP does."""
    model = shapes.Nested(dim=9)
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    for step in range(3):
        pair.step(rank.batch(step, (4, 9)), set_to_none=step % 2 == 0)
        pair.check()


@contract("INIT-9")
@world(2)
@needs(Capability.COUNTED_UNITS)
@pytest.mark.parametrize("reshard_after_forward", RESHARD_ROOT)
def test_nested_units_are_gathered_apart(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A parameter belongs to the innermost unit around it; each unit is gathered when it runs, and reduced once."""
    model = shapes.Nested(dim=9)
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    expected = ["(root)", *(name for (name,) in model.units())]
    in_backward = len(expected) - 1 if reshard_after_forward is None else len(expected) * bool(reshard_after_forward)
    for step in range(2):
        pair.step(rank.batch(step, (4, 9)))
        pair.check()
        gathered = [item.unit for item in pair.last_trace() if item.phase == "forward"]
        assert gathered == expected, f"forward gathers {gathered}"
        pair.check_counts("backward", all_gather=in_backward, reduce_scatter=len(expected))
        pair.check_bytes()
