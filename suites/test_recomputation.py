"""Chapter RECOMPUTATION: activation checkpointing of units, without a second gather."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.models.recomputation import Means, recompute
from shardproof.harness.parity import Rank
from shardproof.harness.plugin.axes import RESHARD

MEANS = pytest.mark.parametrize("means", ["hooks", "call", "wrapper", "reentrant-call"])


@contract("RECOMPUTATION-1", "RECOMPUTATION-2")
@world(2)
@needs(Capability.RECOMPUTATION, Capability.RECOMPUTES_GATHERED, Capability.COUNTED_UNITS, Capability.ROOT_RESHARD)
@MEANS
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_recomputed_units(rank: Rank, reshard_after_forward: Any, means: Means) -> None:
    """Recomputed units train as DDP does without recomputation, and are gathered as often as if nothing recomputed.

    On the way back a unit computes twice, forward again and then backward: one gather serves both.
    """
    config = models.TransformerConfig(layers=3, vocabulary=61, length=16, heads=4)
    model = models.Transformer(config)
    units = len(model.units()) + 1
    pair = rank.pair(
        model,
        units=model.units(),
        reshard_after_forward=reshard_after_forward,
        prepare=functools.partial(recompute, means=means),
    )
    again = {None: units - 1, False: 0}.get(reshard_after_forward, units)
    for step in range(3):
        pair.step(rank.tokens(step, (3, config.length), vocabulary=config.vocabulary), set_to_none=step % 2 == 0)
        pair.check()
        pair.check_counts("forward", all_gather=units)
        pair.check_counts("backward", all_gather=again, reduce_scatter=units)
