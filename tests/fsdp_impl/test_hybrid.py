"""Hybrid sharding: shards within a group, replicas across groups."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from fsdp_impl import fully_shard
from fsdp_impl.common.mesh import check_replicas
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import (
    ALL_REDUCE,
    GATHER,
    REDUCE,
    assert_same,
    average_gradients,
    batch,
    counts,
    plain_copy,
    tower,
)


@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False, 2])
@pytest.mark.parametrize("shape", ["n x 1", "1 x n", "2 x 2"])
def test_trains_as_replicas_do(rank: Rank, shape: str, reshard_after_forward: Any) -> None:
    size = rank.world_size
    mesh = rank.mesh({"n x 1": (size, 1), "1 x n": (1, size), "2 x 2": (2, size // 2)}[shape], ("replicate", "shard"))
    if reshard_after_forward == 2 and mesh.size(1) % 2:
        return
    model = tower(5, 2)
    plain = plain_copy(model)
    for layer in model[1:]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    assert all(param.placements == (Replicate(), Shard(0)) for param in model.parameters())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    for step in range(2):
        inputs = batch(rank, step, (3, 5))
        found = counts(lambda inputs=inputs: model(inputs).square().sum().backward())
        assert found.get(REDUCE, 0) == (3 if mesh.size(1) > 1 else 0)
        assert found[ALL_REDUCE] == 3
        assert (GATHER in found) == (mesh.size(1) > 1)
        plain(inputs).square().sum().backward()
        average_gradients(plain)
        assert_same(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@world(4)
def test_replicas_stay_equal_bit_for_bit(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    model = fully_shard(tower(5, 1), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        model(batch(rank, step, (3, 5))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.reshard()
    for param in model.parameters():
        theirs = param.to_local().clone()
        dist.broadcast(theirs, group_src=0, group=mesh.get_group("replicate"))
        assert torch.equal(theirs, param.to_local())


@world(4)
@pytest.mark.parametrize("factor", [2.0, 4.0, 8.0])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("force_sum", [False, True])
def test_the_divide_factor_holds_over_both_collectives_and_for_one_unit(
    rank: Rank, hybrid: bool, factor: float, force_sum: bool
) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard")) if hybrid else rank.mesh()
    model = tower(5, 1)
    plain = plain_copy(model)
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(factor)
    model.set_force_sum_reduction_for_comms(force_sum)
    inputs = batch(rank, 0, (3, 5))
    model(inputs).square().sum().backward()
    plain(inputs).square().sum().backward()
    average_gradients(plain)
    for param in plain[0].parameters():
        assert param.grad is not None
        param.grad.mul_(rank.world_size / factor)
    assert_same(plain, model)


@world(4)
@pytest.mark.parametrize("hybrid", [False, True])
def test_the_all_reduce_hook_sees_what_was_reduced_and_may_change_it(rank: Rank, hybrid: bool) -> None:
    """Without native replicas, as a user builds them: the hook averages over the other dimension."""
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    model = tower(5, 1)
    plain = plain_copy(model)
    seen: list[int] = []

    def hook(shards: torch.Tensor) -> None:
        seen.append(shards.numel())
        if not hybrid:
            dist.all_reduce(shards, group=mesh.get_group("replicate"))
            shards.div_(2)

    for unit in (model[1], model):
        fully_shard(unit, mesh=mesh if hybrid else mesh["shard"])
        unit.set_all_reduce_hook(hook)
    inputs = batch(rank, 0, (3, 5))
    model(inputs).square().sum().backward()
    plain(inputs).square().sum().backward()
    average_gradients(plain)
    assert len(seen) == 2
    assert_same(plain, model)
    if hybrid:
        with pytest.raises(ValueError, match="stream cannot be set when using native HSDP, but got a stream"):
            model.set_all_reduce_hook(hook, stream="a stream")


@pytest.mark.parametrize("rows", [[[0, 1], [2, 3]], [[3, 1], [2, 0]], [[2], [0], [1]], [[2, 0, 1]]], ids=str)
def test_replicas_in_one_order(rows: list[list[int]]) -> None:
    mesh: Any = SimpleNamespace(mesh=torch.tensor(rows))
    check_replicas(mesh)


@pytest.mark.parametrize("rows", [[[3, 1], [0, 2]], [[0, 1], [2, 3], [5, 4]]], ids=str)
def test_replicas_in_different_orders_are_refused(rows: list[list[int]]) -> None:
    """Process groups are sorted by rank: the ranks of a replicate group would hold different shards."""
    mesh: Any = SimpleNamespace(mesh=torch.tensor(rows))
    with pytest.raises(ValueError, match=r"must be in one order, .* but the mesh is \[\["):
        check_replicas(mesh)
