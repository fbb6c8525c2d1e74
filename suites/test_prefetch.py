"""Chapter PREFETCH: units that gather others ahead, because they were told to."""

from __future__ import annotations

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.findings.finding import step_label
from shardproof.harness.parity import Rank

AHEAD = 2


def two_ahead(depth: int) -> dict[str, dict[str, list[str]]]:
    """Each layer gathers the two that follow it, in the order in which each direction runs."""
    layers = [f"layers.{index}" for index in range(depth)]
    forward = {layers[i]: layers[i + 1 : i + 1 + AHEAD] for i in range(depth - AHEAD)}
    backward = {layers[i]: layers[i - AHEAD : i][::-1] for i in range(AHEAD, depth)}
    return {"forward": forward, "backward": backward}


@contract("PREFETCH-1")
@world(2, 4)
@needs(Capability.EXPLICIT_PREFETCH)
def test_told_units_train_the_same(rank: Rank) -> None:
    """A transformer of eight layers that gather two ahead trains as DDP does."""
    config = models.TransformerConfig(layers=8)
    model = models.Transformer(config)
    pair = rank.pair(model, units=model.units())
    pair.adapter.prefetch(**two_ahead(config.layers))
    for step in range(3):
        pair.step(rank.tokens(step, (2, config.length), vocabulary=config.vocabulary), set_to_none=step % 2 == 0)
        pair.check()


@contract("PREFETCH-2")
@world(2)
@needs(Capability.EXPLICIT_PREFETCH, Capability.COUNTED_UNITS, Capability.GATHER_ORDER, Capability.ROOT_RESHARD)
def test_order(rank: Rank) -> None:
    """A unit gathers itself, if nobody has, and then, before it computes, those that it was told.

    In forward the order of the gathers is the same without a word: what tells is how many came before a unit computes.
    """
    depth = 5
    model = models.Tower(dim=9, depth=depth)
    pair = rank.pair(model, units=model.units(), reshard_after_forward=True)
    pair.adapter.prefetch(**two_ahead(depth))
    units = ["(root)", *(f"layers.{index}" for index in range(depth))]
    gathered: list[list[str]] = []
    for index in range(depth):
        pair.adapter.submodule(f"layers.{index}.in_proj").register_forward_pre_hook(
            lambda module, args: gathered.append([item.unit for item in pair.last_trace() if item.kind == "all_gather"])
        )
    for step in range(2):
        gathered.clear()
        pair.step(rank.batch(step, (4, 9)))
        pair.check()
        for index, found in enumerate(gathered):
            # The root, the layers up to this one, and two ahead.
            expected = units[: 1 + index + 1 + AHEAD]
            missing = [unit for unit in expected if unit not in found]
            where = f"layers.{index} computes in {step_label(step)}"
            assert not missing, f"{where} before these are gathered: {', '.join(missing)}"
            assert found == expected, f"{where} after other units are gathered than should be"
        assert len(gathered) == depth
    rank.expect(
        pair.last_trace().render(),
        """\
forward   all_gather      float32      400 B  ranks 0-1  (root)
forward   all_gather      float32     1480 B  ranks 0-1  layers.0
forward   all_gather      float32     2240 B  ranks 0-1  layers.1
forward   all_gather      float32     2920 B  ranks 0-1  layers.2
forward   all_gather      float32     3680 B  ranks 0-1  layers.3
forward   all_gather      float32     4360 B  ranks 0-1  layers.4
backward  all_gather      float32      400 B  ranks 0-1  (root)
backward  all_gather      float32     4360 B  ranks 0-1  layers.4
backward  all_gather      float32     3680 B  ranks 0-1  layers.3
backward  all_gather      float32     2920 B  ranks 0-1  layers.2
backward  reduce_scatter  float32     4360 B  ranks 0-1  layers.4
backward  all_gather      float32     2240 B  ranks 0-1  layers.1
backward  reduce_scatter  float32     3680 B  ranks 0-1  layers.3
backward  all_gather      float32     1480 B  ranks 0-1  layers.0
backward  reduce_scatter  float32     2920 B  ranks 0-1  layers.2
backward  reduce_scatter  float32     2240 B  ranks 0-1  layers.1
backward  reduce_scatter  float32      400 B  ranks 0-1  (root)
backward  reduce_scatter  float32     1480 B  ranks 0-1  layers.0
""",
    )
