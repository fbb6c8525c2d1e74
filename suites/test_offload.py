"""Chapter OFFLOAD: shards, gradients and the optimizer on the CPU."""

from __future__ import annotations

import pytest

from shardproof.harness import Capability, Hardware, contract, models, needs, world
from shardproof.harness.parity import Rank
from shardproof.harness.plugin.axes import DELAYED, DELAYS


@contract("OFFLOAD-1")
@world(2, 4)
@needs(Capability.OFFLOAD, Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize(
    "offload",
    [
        pytest.param("pageable", marks=needs(Capability.PAGEABLE_OFFLOAD)),
        pytest.param("pinned", marks=needs(Hardware.ACCELERATOR)),
    ],
)
@pytest.mark.parametrize("delays", DELAYED)
def test_offloaded(rank: Rank, delays: tuple[str, ...], offload: str) -> None:
    """Shards that live on the CPU train as DDP does, also when streams run at other speeds."""
    config = models.TransformerConfig(layers=3, vocabulary=61, length=16, heads=4)
    model = models.Transformer(config)
    pair = rank.pair(
        model,
        units=model.units(),
        delays=[DELAYS[name] for name in delays],
        reshard_after_forward=True,
        offload=offload,
    )
    batches = [rank.tokens(step, (3, config.length), vocabulary=config.vocabulary) for step in range(3)]
    for step, tokens in enumerate(batches):
        pair.step(tokens, set_to_none=step % 2 == 0)
        for name, parameter in pair.adapter.named_parameters().items():
            assert parameter.device.type == "cpu", f"{name} is on {parameter.device} after a step"
    pair.check()
