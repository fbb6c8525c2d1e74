"""Without a reduce dtype in the policy, that of the parameters is asked for at each reduction."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_impl import MixedPrecisionPolicy, fully_shard
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import batch


@world(1)
def test_a_cast_between_two_steps_decides(rank: Rank) -> None:
    """torch cannot run a model that is cast after its first forward (F-180), so that no case asks."""
    model: Any = fully_shard(nn.Linear(4, 4), mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(torch.float16))
    seen: list[torch.dtype] = []
    model.set_all_reduce_hook(lambda shard: seen.append(shard.dtype))
    dtypes = [torch.float32, torch.bfloat16]
    for dtype in dtypes:
        model.to(dtype)
        model(batch(rank, 0, (2, 4))).sum().backward()
        assert model.weight.grad.dtype == dtype
        model.zero_grad()
    assert seen == dtypes


class Scaled(nn.Module):
    """Multiplies by a weight in float32 and adds a frozen offset in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.offset = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.offset


@world(1)
def test_two_dtypes_are_refused_by_name(rank: Rank) -> None:
    """The first forward would have refused a second dtype that is trainable then; torch ends in autograd's error."""
    model: Any = fully_shard(Scaled(), mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(torch.float16))
    inputs = batch(rank, 0, (4,))
    model(inputs).sum().backward()
    model.offset.requires_grad_(True)
    with pytest.raises(ValueError, match=r"expects one dtype, .*weight.: torch.float32, .offset.: torch.bfloat16"):
        model(inputs).sum().backward()
