"""Cases of your own, beside those of shardproof: what your implementation promises and no other has to.

The ids in ``@contract`` are those of your own requirements.
"""

import pytest
import torch

from shardproof.testing import Capability, Rank, contract, models, needs, world
from shardproof.testing.make import Clip
from shardproof.testing.train import optim


@contract("OWN-1")
@world(2, 4)
@pytest.mark.parametrize("dim", [8, 9])
def test_each_state_is_on_one_rank(rank: Rank, dim: int) -> None:
    """The optimizer's state of each element is on one rank, without padding."""
    model = models.MLP(dim)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    run = rank.run(model, optimizer=optim.sgd())
    run.step([(rank.batch(0, (4, dim)),)], loss=models.mean_square)
    state = run.adapter.optimizer_state() or {}
    held = rank.exchange({name: pieces["momentum_buffer"].tensor.numel() for name, pieces in state.items()})
    assert {name: sum(one[name] for one in held) for name in sizes} == sizes


@contract("OWN-2")
@world(2)
@needs(Capability.CLIP_BY_CALL)
@pytest.mark.parametrize("norm_type", [2.0, 3.0])
def test_clipping_by_other_norms(rank: Rank, norm_type: float) -> None:
    """Gradients are clipped as those of DistributedDataParallel."""
    pair = rank.pair(models.MLP(8), clip=Clip(1e-3, norm_type))
    pair.step(rank.batch(0, (4, 8)))
    pair.check()


@contract("OWN-3")
@world(2)
def test_ranks_agree_after_the_step(rank: Rank) -> None:
    """Every rank computes with the same parameters, bit for bit."""
    run = rank.run(models.MLP(8), optimizer=optim.sgd())
    run.step([(rank.batch(0, (4, 8)),)], loss=models.mean_square)
    with torch.no_grad():
        first, *others = rank.exchange(run.adapter.forward(torch.ones(2, 8, device=rank.device)))
    assert all(torch.equal(first, other) for other in others)
