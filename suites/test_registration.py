"""Chapter REGISTRATION: which parameters a module shows between the phases of a step."""

from __future__ import annotations

import copy

import pytest
from torch import nn

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.findings.finding import step_label
from shardproof.harness.parity import Rank, Run, exact_difference
from shardproof.harness.plugin.axes import RESHARD, RESHARD_UNEVEN, with_first

pytestmark = [needs(Capability.REGISTERED_STATE), world(2, 4)]

UNITS = pytest.mark.parametrize("units", [[], [["layers.0"], ["layers.1"]]], ids=["root-only", "three-units"])


@contract("REGISTRATION-1")
@needs(Capability.MANUAL_RESHARD, Capability.ROOT_RESHARD)
@UNITS
@pytest.mark.parametrize(
    ("dim", "reshard_after_forward"),
    [*with_first(8, RESHARD), *with_first(5, RESHARD_UNEVEN)],
)
def test_after_forward(rank: Rank, dim: int, units: list[list[str]], reshard_after_forward: bool | int | None) -> None:
    """After forward a unit shows shards if it reshards, gathered parameters otherwise; values never change.

    The default is to reshard every unit but the root's, and an explicit choice is the root's as well.
    Both with sizes that every group divides and with sizes that none does.
    """
    model = models.Tower(dim=dim, depth=2)
    original = copy.deepcopy(model).to(rank.device)
    run = rank.run(model, units=units, reshard_after_forward=reshard_after_forward)
    _assert_sharded(run, "before forward")
    _assert_values(run, original)

    run.adapter.forward(rank.batch(0, (3, dim)))
    keeps = {"root": reshard_after_forward in (None, False), "others": reshard_after_forward is False}
    for name, gathered in run.adapter.gathered().items():
        owner = "others" if units and name.startswith("layers.") else "root"
        assert gathered == keeps[owner], f"{name}: gathered is {gathered} after forward with {reshard_after_forward!r}"
    _assert_values(run, original)

    run.adapter.reshard()
    _assert_sharded(run, "after reshard()")
    _assert_values(run, original)


@contract("REGISTRATION-2")
@UNITS
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_after_backward(rank: Rank, units: list[list[str]], reshard_after_forward: bool | int | None) -> None:
    """After backward every unit shows shards, whatever it did after forward."""
    model = models.Tower(dim=5, depth=2)
    original = copy.deepcopy(model).to(rank.device)
    run = rank.run(model, units=units, reshard_after_forward=reshard_after_forward)
    for step in range(2):
        run.forward_backward((rank.batch(step, (3, 5)),), loss=models.mean_square)
        _assert_sharded(run, f"after the backward of {step_label(step)}")
        _assert_values(run, original)


def _assert_sharded(run: Run, when: str) -> None:
    """Every parameter is shown sharded; if not, name the units that are not."""
    units = {name: unit.label for unit in run.units for name in unit.names}
    gathered = sorted({units[name] for name, is_gathered in run.adapter.gathered().items() if is_gathered})
    assert not gathered, f"{when} every parameter is sharded, but units are gathered: {', '.join(gathered)}"


def _assert_values(run: Run, original: nn.Module) -> None:
    """What is shown is, bit for bit, this rank's part of the original: nothing has been computed with it."""
    full = dict(original.named_parameters())
    pieces = run.adapter.registered()
    assert pieces.keys() == full.keys()
    for name, piece in pieces.items():
        difference = exact_difference(piece.tensor, piece.cut(full[name].detach()))
        assert difference is None, f"{name}: element, shown and original: {difference}"
