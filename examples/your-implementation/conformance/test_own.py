"""Cases of your own, beside those of shardproof: what your implementation promises and no other has to.

The ids in ``@contract`` are those of your own requirements.
"""

import pytest
import torch

from shardproof.testing import Capability, Rank, contract, models, needs, world
from shardproof.testing.adapters import Clip
from shardproof.testing.trained import optim


@contract("OWN-1")
@world(2, 4)
@pytest.mark.parametrize("dim", [8, 9])
def test_each_state_is_on_one_rank(rank: Rank, dim: int) -> None:
    """Of each parameter exactly one rank has optimizer state."""
    run = rank.run(models.MLP(dim), optimizer=optim.sgd())
    run.step([(rank.batch(0, (4, dim)),)], loss=models.mean_square)
    held = rank.exchange(sorted(run.adapter.optimizer_state() or {}))
    assert sorted(name for names in held for name in names) == sorted(run.adapter.named_parameters())


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
    """Every rank has the same parameters, bit for bit."""
    run = rank.run(models.MLP(8), optimizer=optim.sgd())
    run.step([(rank.batch(0, (4, 8)),)], loss=models.mean_square)
    first, *others = rank.exchange([piece.tensor for _, piece in sorted(run.adapter.parameters().items())])
    assert all(torch.equal(mine, theirs) for other in others for mine, theirs in zip(first, other, strict=True))
