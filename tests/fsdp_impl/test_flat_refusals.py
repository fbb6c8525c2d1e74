"""What FullyShardedDataParallel refuses in words of its own, or where torch does something else."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_impl import FullyShardedDataParallel, ShardingStrategy, StateDictType
from fsdp_impl.wrap import ModuleWrapPolicy
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import NONE, wrap, wrap_children
from tests.fsdp_impl.replicas import batch, tower

LOCAL = StateDictType.LOCAL_STATE_DICT


@world(2)
def test_local_states(rank: Rank) -> None:
    """Of replicas, of which torch gives full states with a warning, and of optimizers."""
    model = wrap(tower(3), sharding_strategy=NONE, device_id=rank.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FullyShardedDataParallel.state_dict_type(model, LOCAL):
        with pytest.raises(RuntimeError, match="``local_state_dict`` can only be used when parameters are flatten"):
            model.state_dict()
        with pytest.raises(NotImplementedError, match="its own"):
            FullyShardedDataParallel.optim_state_dict(model, optimizer)


@world(2)
def test_states_of_other_models(rank: Rank) -> None:
    model = wrap(tower(3), device_id=rank.device)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) that the model does not have"):
        FullyShardedDataParallel.optim_state_dict(model, stranger)
    with pytest.raises(ValueError, match="Expects a module with FSDP modules"):
        FullyShardedDataParallel.full_optim_state_dict(nn.Linear(2, 2), stranger)
    with pytest.raises(ValueError, match="Expects a module with FSDP modules"):
        FullyShardedDataParallel.get_state_dict_type(nn.Linear(2, 2))


@world(2)
def test_hybrid_shards_on_the_cpu(rank: Rank) -> None:
    """All ranks on the CPU count as one host; torch counts by devices, of which a CPU has one."""
    if rank.device.type != "cpu":
        return
    hybrid, rule = ShardingStrategy.HYBRID_SHARD, ModuleWrapPolicy({nn.Linear})
    model = wrap(tower(3), sharding_strategy=hybrid, auto_wrap_policy=rule, device_id=rank.device)
    groups: list[Any] = [model.process_group, model._unit.options.ranks.across]
    assert [group.size() for group in groups] == [2, 1]
    for group in groups:
        dist.destroy_process_group(group)


@world(2)
def test_apply_while_parameters_are_gathered(rank: Rank) -> None:
    model = wrap_children(tower(5, 1), device_id=rank.device)
    refused = r"expected to be in states .* current state is "
    with (
        FullyShardedDataParallel.summon_full_params(model),
        pytest.raises(ValueError, match=refused + "SUMMONED"),
    ):
        model.apply(print)
    model[1].module.register_forward_hook(lambda module, args, output: model.apply(print))
    with pytest.raises(ValueError, match=refused + "FORWARD"):
        model(batch(rank, 0, (2, 5)))


@world(2)
def test_a_number_as_ignored_modules(rank: Rank) -> None:
    """By the name of the option; torch says only that a number is not iterable."""
    with pytest.raises(TypeError, match=r"`ignored_modules` should be an iterable .* got <class 'int'>"):
        wrap(tower(3), ignored_modules=3, device_id=rank.device)
