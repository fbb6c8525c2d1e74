"""How errors and profiles name units and parameters."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from fsdp_impl import CPUOffloadPolicy, fully_shard, register_fsdp_forward_method, validate_order
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import wrap_children
from tests.fsdp_impl.replicas import batch, tower


@world(2)
def test_flat_units_by_the_names_of_their_wrappers(rank: Rank) -> None:
    model = wrap_children(tower(4, 1), device_id=rank.device)
    model(batch(rank, 0, (2, 4)))
    names = {group.label: list(group.names) for group in model._unit.iteration.groups}
    inner = [f"1.{layer}.{name}" for layer in ("in_proj", "out_proj") for name in ("weight", "bias")]
    assert names == {"(root)": ["0.weight", "0.bias"], "1": inner}


@world(2)
def test_offloaded_parameters_by_the_device_they_were_moved_to(rank: Rank) -> None:
    """Without a device, shards become tensors that claim to be on one."""
    model: Any = fully_shard(tower(4, 1), mesh=rank.mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    if rank.device.type == "cpu":
        for param in model.parameters():
            local = param.to_local().detach().to("meta")
            param._local_tensor = FakeTensor(FakeTensorMode(), local, torch.device("cuda:0"))
    else:
        model.to(rank.device)
    with pytest.raises(RuntimeError, match=r"on CPU when enabling CPU offloading.*\('0.weight', device\(type='cuda'"):
        model(batch(rank, 0, (2, 4)))


@world(1)
def test_a_forward_method_by_the_type_that_lacks_it(rank: Rank) -> None:
    """The suites accept any error that names the method, which Python's own AttributeError does too."""
    module: Any = fully_shard(nn.Linear(2, 2), mesh=rank.mesh())
    with pytest.raises(ValueError, match=r"FSDPLinear.* does not have a method other"):
        register_fsdp_forward_method(module, "other")


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
