"""A model that nobody has any more is freed, whatever it went through."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_impl import CPUOffloadPolicy, ShardingStrategy, fully_shard
from shardproof.harness.parity.rank import Rank
from shardproof.harness.tensors import memory
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import wrap_children
from tests.fsdp_impl.replicas import batch, tower


def per_parameter(rank: Rank, **options: Any) -> nn.Module:
    model = tower(4, 2).to(rank.device)
    for layer in model[1:]:
        fully_shard(layer, mesh=rank.mesh(), **options)
    return fully_shard(model, mesh=rank.mesh(), **options)


def flat(rank: Rank, **options: Any) -> nn.Module:
    return wrap_children(tower(4, 2), device_id=rank.device, **options)


def offloaded(rank: Rank) -> nn.Module:
    return per_parameter(rank, offload_policy=CPUOffloadPolicy(pin_memory=False))


def in_two_sizes(rank: Rank) -> nn.Module:
    return per_parameter(rank, reshard_after_forward=2)


def kept(rank: Rank) -> nn.Module:
    return flat(rank, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


def not_sharded(rank: Rank) -> nn.Module:
    return flat(rank, sharding_strategy=ShardingStrategy.NO_SHARD)


def flat_only(rank: Rank) -> nn.Module:
    return flat(rank, use_orig_params=False)


def forward(rank: Rank, model: nn.Module) -> None:
    with torch.no_grad():
        model(batch(rank, 0, (2, 4)))


def graph_left(rank: Rank, model: nn.Module) -> None:
    model(batch(rank, 0, (2, 4)))


def steps(rank: Rank, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(2):
        model(batch(rank, number, (2, 4))).sum().backward()
        optimizer.step()


@world(2)
@pytest.mark.parametrize("use", [forward, graph_left, steps])
@pytest.mark.parametrize("make", [per_parameter, offloaded, in_two_sizes, flat, flat_only, kept, not_sharded])
def test_models_are_freed(
    rank: Rank, make: Callable[[Rank], nn.Module], use: Callable[[Rank, nn.Module], None]
) -> None:
    model = make(rank)
    modules = [weakref.ref(module) for module in model.modules()]
    use(rank, model)
    del model
    memory.collect_garbage()
    assert [module() for module in modules if module() is not None] == []
