"""Chapter COMPILED: units whose modules are compiled, with what shards them outside the graphs."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.models.compilation import compiler
from shardproof.harness.models.recomputation import Means, recompute
from shardproof.harness.parity import Rank
from shardproof.harness.plugin.axes import RESHARD

RECOMPUTES = needs(Capability.RECOMPUTATION)


@contract("COMPILED-1")
@world(2)
@needs(Capability.COMPILED_MODULES)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize(
    "means", [None, pytest.param("call", marks=RECOMPUTES), pytest.param("wrapper", marks=RECOMPUTES)]
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_units(
    rank: Rank, backend: str, means: Means | None, reshard_after_forward: bool | int | None
) -> None:
    """Compiled units, recomputed or not, train as DDP does uncompiled, and nothing is compiled again."""
    config = models.TransformerConfig(layers=2)
    model = models.Transformer(config)
    with compiler(backend) as compiled:

        def prepare(plain: nn.Module) -> Any:
            made = compiled.compile_layers(plain)
            return recompute(made, means) if means else made

        pair = rank.pair(
            model, units=model.units(), reshard_after_forward=reshard_after_forward, prepare=prepare, is_traced=False
        )
        graphs = []
        for step in range(3):
            pair.step(rank.tokens(step, (3, config.length), vocabulary=config.vocabulary), set_to_none=step % 2 == 0)
            pair.check()
            graphs.append(compiled.graphs)
        assert graphs[0] > 0, "nothing was compiled"
        assert graphs == graphs[:1] * 3, f"{graphs} graphs after each step: something was compiled again"
