"""Chapter INIT: how a sharded model comes to be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shardproof.harness import Capability, contract, needs, world
from shardproof.harness.models import mixed, shapes
from shardproof.harness.parity import Rank, states
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


@contract("INIT-3")
@world(2, 4)
@needs(Capability.META_LOAD, Capability.FULL_STATE_DICT)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize("on_meta", ["others", "all"])
def test_values_of_the_first_rank(rank: Rank, on_meta: str, strict: bool) -> None:
    """Ranks on the meta device take parameters and buffers of the first rank's state dict, also with unknown names."""
    torch.manual_seed(rank.seeds.init + 1)
    saved, first = mixed.Mixed(), rank.index == 0
    units: Any = [["low"], ["high"]]
    run = rank.run(
        mixed.Mixed(),
        units=units,
        prepare=lambda model: model if first and on_meta == "others" else model.to("meta"),
    )
    state = copy.deepcopy(saved.state_dict()) if first else {}
    if first and not strict:
        state["stray"] = torch.ones(3)
    run.adapter.restore({"model": state}, form="first-rank", strict=strict)
    expected = {"model": {name: value.clone() for name, value in saved.state_dict().items()}}
    states.check_same(rank, states.read(rank, run), expected)
    twin = rank.run(saved, units=units)
    batch = (rank.batch(0, (6, 4)),)
    outputs, others = run.evaluate(batch), twin.evaluate(batch)
    assert torch.equal(outputs[0], others[0]), "the forward after loading has other values"
