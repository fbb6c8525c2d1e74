"""Chapter COLLECTIVES: how many, how large, in which order."""

from __future__ import annotations

import pytest

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.parity import Rank
from shardproof.harness.plugin.axes import RESHARD_ROOT

DEPTH = 3
UNITS = DEPTH + 1  # the root has parameters of its own


@contract("COLLECTIVES-1", "COLLECTIVES-2")
@world(2, 4)
@needs(Capability.COUNTED_UNITS)
@pytest.mark.parametrize("reshard_after_forward", RESHARD_ROOT)
def test_counts_and_bytes(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Each unit is gathered once in forward, again in backward if it was freed, and reduced once."""
    model = models.Tower(dim=9, depth=DEPTH)
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    kept: dict[bool | int | None, int] = {None: DEPTH, False: 0}
    in_backward = kept.get(reshard_after_forward, UNITS)
    for step in range(2):
        pair.step(rank.batch(step, (4, 9)))
        pair.check()
        pair.check_counts("forward", all_gather=UNITS)
        pair.check_counts("backward", all_gather=in_backward, reduce_scatter=UNITS)
        pair.check_counts("step")
        pair.check_bytes()


@contract("COLLECTIVES-3")
@world(1)
@needs(Capability.SINGLE_RANK)
def test_no_collectives_alone(rank: Rank) -> None:
    """A world of one rank has nobody to talk to."""
    model = models.Tower(dim=9, depth=DEPTH)
    pair = rank.pair(model, units=model.units())
    for step in range(2):
        pair.step(rank.batch(step, (4, 9)))
        pair.check()
    for phase in ("forward", "backward", "step"):
        pair.check_counts(phase)


@contract("COLLECTIVES-4")
@world(2)
@needs(Capability.COUNTED_UNITS, Capability.GATHER_ORDER, Capability.ROOT_RESHARD)
def test_order(rank: Rank) -> None:
    """Forward gathers each unit when it runs; backward gathers one unit ahead of the one that it reduces."""
    model = models.Tower(dim=9, depth=DEPTH)
    pair = rank.pair(model, units=model.units(), reshard_after_forward=True)
    pair.step(rank.batch(0, (4, 9)))
    pair.check()
    rank.expect(
        pair.sharded.trace.render(),
        """\
forward   all_gather      float32      400 B  ranks 0-1  (root)
forward   all_gather      float32     1480 B  ranks 0-1  layers.0
forward   all_gather      float32     2240 B  ranks 0-1  layers.1
forward   all_gather      float32     2920 B  ranks 0-1  layers.2
backward  all_gather      float32      400 B  ranks 0-1  (root)
backward  all_gather      float32     2920 B  ranks 0-1  layers.2
backward  all_gather      float32     2240 B  ranks 0-1  layers.1
backward  reduce_scatter  float32     2920 B  ranks 0-1  layers.2
backward  all_gather      float32     1480 B  ranks 0-1  layers.0
backward  reduce_scatter  float32     2240 B  ranks 0-1  layers.1
backward  reduce_scatter  float32      400 B  ranks 0-1  (root)
backward  reduce_scatter  float32     1480 B  ranks 0-1  layers.0
""",
    )
