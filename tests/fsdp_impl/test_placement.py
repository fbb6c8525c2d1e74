"""``shard_placement_fn``: parameters cut along other dimensions."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_impl import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import MLP, assert_same, average_gradients, batch, full, plain_copy, tower


def largest(param: nn.Parameter) -> Shard:
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))


def last(param: nn.Parameter) -> Shard | None:
    return Shard(-1) if param.ndim > 1 else None


@world(2, 4)
@pytest.mark.parametrize("placement", [largest, last])
@pytest.mark.parametrize("raf", [True, False, 2])
def test_trains_as_replicas_do(rank: Rank, placement: Any, raf: Any) -> None:
    """Between parameters cut along dimension 0; shards and gradients are contiguous."""
    for options in ({}, {"mesh": rank.mesh((1, rank.world_size), ("replicate", "shard"))}):
        options.setdefault("mesh", rank.mesh())
        model = tower(4, 2)
        plain = plain_copy(model)
        for layer in model[1:]:
            fully_shard(layer, shard_placement_fn=placement, reshard_after_forward=raf, **options)
        fully_shard(model, shard_placement_fn=placement, reshard_after_forward=raf, **options)
        assert model[1].out_proj.weight.placements[-1] == Shard(1)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
        for step in range(2):
            inputs = batch(rank, step, (3, 4))
            model(inputs).square().sum().backward()
            plain(inputs).square().sum().backward()
            average_gradients(plain)
            assert_same(plain, model)
            for param in model.parameters():
                assert param.to_local().is_contiguous()
                assert param.grad.to_local().is_contiguous()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@world(2)
def test_with_several_dtypes_casts_and_offloading(rank: Rank) -> None:
    model = tower(4, 1)
    model[0].table = nn.Parameter(torch.arange(24, dtype=torch.int32).view(3, 4, 2), requires_grad=False)
    model[0].scale = nn.Parameter(torch.ones(2, 2, dtype=torch.float64), requires_grad=False)
    plain = plain_copy(model)
    offload = CPUOffloadPolicy(pin_memory=rank.device.type != "cpu")
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    place = lambda param: Shard(1) if param.ndim > 1 else Shard(0)  # noqa: E731
    fully_shard(model, mesh=rank.mesh(), shard_placement_fn=place, mp_policy=policy, offload_policy=offload)
    inputs = batch(rank, 0, (3, 4))
    model(inputs).square().sum().backward()
    assert torch.equal(full(model[0].table).cpu(), plain[0].table.cpu())
    assert torch.equal(full(model[0].scale).cpu(), plain[0].scale.cpu())
    plain(inputs).square().sum().backward()
    average_gradients(plain)
    assert_same(plain, model)


@world(4)
def test_across_the_cut_of_tensor_parallelism(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(MLP(4))
    plain = plain_copy(model)
    parallelize_module(model[0], mesh["tp"], {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()})

    def other_dim(param: Any) -> Shard:
        dims = [placement.dim for placement in param.placements if isinstance(placement, Shard)]
        return Shard(1 - dims[0]) if dims and param.ndim == 2 else Shard(0)

    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=other_dim)
    assert model[0].in_proj.weight.placements == (Shard(1), Shard(0))
    assert model[0].out_proj.weight.placements == (Shard(0), Shard(1))
    assert model[0].out_proj.bias.placements == (Shard(0), Replicate())
    inputs = batch(rank, 0, (3, 4), index=mesh.get_local_rank("dp"))
    model(inputs).square().sum().backward()
    plain(inputs).square().sum().backward()
    average_gradients(plain, mesh.get_group("dp"))
    assert_same(plain, model)


@pytest.mark.parametrize(
    "placement, error, text",
    [
        (Shard(1), NotImplementedError, r"does not support uneven sharding on dim 1: .*\[4, 3\]\) of weight"),
        (Shard(2), AssertionError, r"Shard dim 2 is invalid for 2D tensor: .*\[4, 3\]\) of weight"),
        (Shard(-3), AssertionError, r"Shard dim -1 is invalid for 2D tensor"),
        (Replicate(), ValueError, r"Invalid shard_placement_fn result: R.* for parameter weight"),
    ],
    ids=str,
)
@world(2)
def test_wrong_placements_are_refused(rank: Rank, placement: Any, error: type[Exception], text: str) -> None:
    model = nn.Linear(3, 4)
    with pytest.raises(error, match=text):
        fully_shard(model, mesh=rank.mesh(), shard_placement_fn=lambda _: placement)
    assert type(model) is nn.Linear
    assert type(model.weight) is nn.Parameter


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = tower(4, 1)
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        return x + (x @ self.empty.t()).sum()


@world(2)
def test_an_empty_parameter_trains(rank: Rank) -> None:
    """It has no rows, and is cut along its columns."""
    model = WithEmpty()
    plain = plain_copy(model)
    fully_shard(model, mesh=rank.mesh(), shard_placement_fn=lambda param: Shard(param.ndim - 1))
    inputs = batch(rank, 0, (3, 4))
    for one in (model, plain):
        one(inputs).square().sum().backward()
    average_gradients(plain)
    assert_same(plain, model)
