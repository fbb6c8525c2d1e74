"""Chapter TIED: a parameter that several modules of one unit share."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.models.recomputation import recompute
from shardproof.harness.parity import Rank


@contract("TIED-1")
@world(2, 4)
@needs(Capability.TIED_PARAMETERS, Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("reshard_after_forward", [False, True])
@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=needs(Capability.RECOMPUTATION))])
def test_tied_embedding(rank: Rank, recomputes: bool, reshard_after_forward: bool | None) -> None:
    """An output projection that is the embedding sums both gradients and is sharded, and moved, once."""
    config = models.TransformerConfig(layers=3, vocabulary=4 * rank.world_size + 1, is_tied=True)
    model = models.Transformer(config)
    prepare: Any = functools.partial(recompute, means="hooks") if recomputes else None
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward, prepare=prepare)
    assert "output.weight" not in pair.adapter.parameters(), "the shared parameter has the first of its names"
    for step in range(3):
        pair.step(rank.tokens(step, (2, config.length), vocabulary=config.vocabulary), set_to_none=step % 2 == 0)
        pair.check()
