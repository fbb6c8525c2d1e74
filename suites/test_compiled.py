"""Chapter COMPILED: units whose modules are compiled, with the sharding code outside the graphs."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.testing import Capability, Pair, Rank, contract, models, needs, world
from shardproof.testing.axes import DELAYED_BEFORE, DELAYS, KEEPS, RESHARD
from shardproof.testing.make import pair_by_units
from shardproof.testing.train import Means, checked_steps, compiler, recompute, tokens

pytestmark = [needs(Capability.COMPILED_MODULES), world(2)]

RECOMPUTES = needs(Capability.RECOMPUTATION)


@contract("COMPILED-1", "COMPILED-2")
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize("means", [None, *(pytest.param(name, marks=RECOMPUTES) for name in ("call", "wrapper"))])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_units(
    rank: Rank, backend: str, means: Means | None, reshard_after_forward: bool | int | None
) -> None:
    """Compiled units, recomputed or not, train as DDP does uncompiled, with as many graphs as unsharded."""
    config = models.TransformerConfig(layers=2)
    model = models.Transformer(config)
    unsharded = _unsharded_graphs(config, rank.device, backend, means, ((3, config.length),))
    with compiler(backend) as compiled:

        def prepare(plain: nn.Module) -> Any:
            made = compiled.compile_layers(plain)
            return recompute(made, means) if means else made

        pair = pair_by_units(rank, model, reshard_after_forward=reshard_after_forward, prepare=prepare, is_traced=False)
        graphs = _graphs_of_steps(rank, pair, config, compiled)
        assert graphs[0] > 0, "nothing was compiled"
        assert graphs[:1] == unsharded, f"{graphs[0]} graphs, and {unsharded[0]} unsharded: sharding breaks graphs"
        assert graphs == graphs[:1] * 3, f"{graphs} graphs after each step: something was compiled again"


def _graphs_of_steps(rank: Rank, pair: Pair, config: models.TransformerConfig, compiled: Any) -> list[int]:
    """The numbers of graphs after each of three steps."""
    drawn = tokens(rank, 3, (3, config.length), vocabulary=config.vocabulary)
    return [compiled.graphs for _ in checked_steps(pair, drawn, set_to_none="even")]


@contract("COMPILED-2")
@KEEPS
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.nightly)], ids=["on-change", "always"])
def test_batches_of_other_sizes(rank: Rank, dynamic: bool | None, reshard_after_forward: bool | None) -> None:
    """Units compiled for changing sizes train as DDP does, and are recompiled only when the unsharded model is."""
    config = models.TransformerConfig(layers=1)
    model = models.Transformer(config)
    unsharded = _unsharded_graphs(config, rank.device, "aot_eager", None, SIZES, dynamic)
    assert unsharded[-1] == unsharded[-2], f"{unsharded} graphs unsharded: compiled for each size anew"
    with compiler("aot_eager") as compiled:
        options: Any = {"reshard_after_forward": reshard_after_forward, "is_traced": False}
        options["prepare"] = functools.partial(compiled.compile_layers, dynamic=dynamic)
        pair = pair_by_units(rank, model, **options)
        graphs = []
        for step, size in enumerate(SIZES):
            pair.checked_step(rank.tokens(step, size, vocabulary=config.vocabulary))
            graphs.append(compiled.graphs)
        assert graphs == unsharded, f"{graphs} graphs after each step, and {unsharded} unsharded"


#: Batches and sequence lengths. All sizes of a batch differ and none is 1, which the compiler would treat as fixed.
SIZES = ((3, 7), (5, 6), (4, 7))


@functools.cache
def _unsharded_graphs(
    config: models.TransformerConfig,
    device: torch.device,
    backend: str,
    means: Means | None,
    sizes: tuple[tuple[int, int], ...],
    dynamic: bool | None = None,
) -> list[int]:
    """The numbers of graphs after each step of the unsharded model; a rank counts them once."""
    drawn_on, counts = [] if device.type == "cpu" else [device], []
    with torch.random.fork_rng(drawn_on), compiler(backend) as compiled:
        made: Any = compiled.compile_layers(models.Transformer(config).to(device), dynamic=dynamic)
        made = recompute(made, means) if means else made
        for size in sizes:
            models.mean_square(made(torch.zeros(size, dtype=torch.long, device=device))).backward()
            counts.append(compiled.graphs)
    return counts


@contract("COMPILED-3")
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize(
    ("means", "delays"),
    [
        *(pytest.param(None, *one.values, id=one.id, marks=one.marks) for one in DELAYED_BEFORE),
        *(pytest.param(one, (), id=one, marks=RECOMPUTES) for one in ("call", "wrapper")),
    ],
)
def test_root_compiled_after_sharding(
    rank: Rank, means: Means | None, delays: tuple[str, ...], reshard_after_forward: bool | int | None
) -> None:
    """A root that is compiled after sharding, with its units, trains as DDP does and is not recompiled.

    So it does where its units are recomputed, and where streams run at other speeds.
    """
    config = models.TransformerConfig(layers=2)
    options: Any = {"reshard_after_forward": reshard_after_forward, "is_traced": False}
    options |= {"prepare": functools.partial(recompute, means=means)} if means else {}
    # Where each parameter is gathered by itself, in forward, the gathers are in the graph, and no delay reaches them.
    reached = Capability.COUNTED_UNITS in rank.implementation.capabilities()
    options["delays"] = [DELAYS[name] for name in delays if reached or DELAYS[name].at != "collective"]
    pair = pair_by_units(rank, models.Transformer(config), **options)
    with compiler("aot_eager") as compiled:
        pair.adapter.module.compile(backend=compiled)
        graphs = _graphs_of_steps(rank, pair, config, compiled)
        assert graphs[0] > 0, "nothing was compiled"
        assert graphs[1] == graphs[2], f"{graphs} graphs after each step: the third step was compiled again"
