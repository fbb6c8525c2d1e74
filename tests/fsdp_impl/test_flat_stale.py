"""Values that stay gathered are dropped on all ranks or on none, whichever ranks hold what has changed."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_impl import FullyShardedDataParallel
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import ZERO2, wrap
from tests.fsdp_impl.replicas import batch


class Scaled(nn.Module):
    """One trainable element, which rank 0 holds, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.base = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.scale


def sharded(rank: Rank, **options: Any) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    return wrap(Scaled().to(rank.device), sharding_strategy=ZERO2, device_id=rank.device, **options)


@torch.no_grad()
def doubled(model: nn.Module, inputs: torch.Tensor, before: torch.Tensor) -> bool:
    return torch.equal(model(inputs), before * 2)


@world(2)
def test_a_step_that_changes_one_rank_alone(rank: Rank) -> None:
    model = sharded(rank, use_orig_params=True)
    inputs = batch(rank, 0, (2, 5), index=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model(inputs)
    (before.sum() * 0 + before.detach().sum() * 0).backward()
    with torch.no_grad():
        model(inputs)
    for param in model.parameters():
        if param.grad is not None and param.numel():
            param.grad.fill_(-2.0)
    optimizer.step()
    assert doubled(model, inputs, before.detach())


@world(2)
def test_a_state_dict_with_one_ranks_values_alone(rank: Rank) -> None:
    model = sharded(rank, use_orig_params=True)
    inputs = batch(rank, 0, (2, 5), index=0)
    with torch.no_grad():
        before = model(inputs)
    model.load_state_dict({"scale": torch.tensor([4.0])}, strict=False)
    assert doubled(model, inputs, before)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_the_first_rank_alone_writes_is_dropped(rank: Rank, use_orig_params: bool) -> None:
    torch.manual_seed(0)
    model = wrap(
        nn.Linear(5, 5).to(rank.device), sharding_strategy=ZERO2, device_id=rank.device, use_orig_params=use_orig_params
    )
    inputs = batch(rank, 0, (2, 5), index=0)
    with torch.no_grad():
        before = model(inputs)
        with FullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True):
            if rank.index == 0:
                for param in model.parameters():
                    param.mul_(3)
        assert torch.equal(model(inputs), before)
