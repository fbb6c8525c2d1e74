"""Chapter IGNORED: parameters left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardproof.harness import Capability, contract, needs, world
from shardproof.harness.findings.finding import step_label
from shardproof.harness.models import mixed, optim
from shardproof.harness.parity import Rank, check_equal, run_and_replica
from shardproof.harness.plugin.axes import RESHARD

SHAPE = (6, 4)
IGNORED = {
    "of-a-unit": ("low.shift",),
    "of-the-root": ("gain",),
    "a-whole-unit": ("high.weight", "high.shift"),
}


@contract("IGNORED-1")
@world(2)
@needs(Capability.IGNORED_PARAMETERS)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize("ignored", IGNORED)
def test_ignored_parameters(rank: Rank, ignored: str, reshard_after_forward: bool | int | None) -> None:
    """An ignored parameter is the same object, whole on every rank, and its gradient is the rank's own."""
    names = IGNORED[ignored]
    model = mixed.Mixed().to(rank.device)
    objects: dict[str, nn.Parameter] = {name: model.get_parameter(name) for name in names}
    run, replica = run_and_replica(
        rank,
        model,
        units=[["low"], ["high"]],
        optimizer=optim.sgd(),
        ignored=names,
        reshard_after_forward=reshard_after_forward,
    )
    for step in range(3):
        batch = [(rank.batch(step, SHAPE),)]
        expected = replica.step(batch, loss=torch.sum)
        check_equal(rank, run, run.step(batch, loss=torch.sum), expected, number=step)
        found = run.adapter.named_parameters()
        replaced = [name for name in names if found[name] is not objects[name]]
        assert not replaced, f"after {step_label(step)} another parameter is registered as {', '.join(replaced)}"
    other = [str(item) for item in run.trace if item.kind in ("all_gather", "reduce_scatter") and not item.unit]
    assert not other, f"the sizes of these collectives are those of no unit without its ignored parameters: {other}"
