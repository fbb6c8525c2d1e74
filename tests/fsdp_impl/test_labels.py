"""What profiles call the units, and the error of a model that has none."""

from typing import Any

import pytest
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdp_impl import fully_shard, validate_order
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import batch, tower


@world(1)
def test_units_have_their_names_from_the_root(rank: Rank) -> None:
    model: Any = tower(4)
    for unit in ([model[1], model[2]], model[3], model):
        fully_shard(unit, mesh=rank.mesh())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(batch(rank, 0, (2, 4))).sum().backward()
    found = {event.key for event in profiler.key_averages() if event.key.startswith(("FSDP::gather", "FSDP::reduce"))}
    assert found == {f"FSDP::{what} ({unit})" for what in ("gather", "reduce") for unit in ("1, 2", "3", "(root)")}


def test_a_model_without_units_has_no_order() -> None:
    with pytest.raises(ValueError, match=r"Expects a model with FSDPModules but got .*Linear"):
        validate_order(nn.Linear(2, 2))
