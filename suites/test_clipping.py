"""Chapter CLIPPING: the norm of all gradients together, and gradients scaled by it."""

from __future__ import annotations

import functools
import math

import pytest

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.adapters.base import Clip
from shardproof.harness.models.parallel import MLPStack, parallelize_mlps
from shardproof.harness.parity import Rank


@contract("CLIPPING-1")
@world(2, 4, 8)
@pytest.mark.parametrize(
    "norm_type", [2.0, *(pytest.param(p, marks=needs(Capability.CLIP_ANY_NORM)) for p in (1.0, math.inf))]
)
def test_total_norm_and_clipped_gradients(rank: Rank, norm_type: float) -> None:
    """Every rank computes the norm of the full gradients and clips its share by it."""
    # Rows for every rank of eight in every parameter: empty shards have a case of their own.
    config = models.TransformerConfig(vocabulary=15, dim=16, heads=4)
    model = models.Transformer(config)
    pair = rank.pair(model, units=model.units(), clip=Clip(max_norm=0.01, norm_type=norm_type))
    for step in range(3):
        pair.step(rank.tokens(step, (3, config.length), vocabulary=config.vocabulary))
        pair.check()


@contract("CLIPPING-2")
@world(2, 4)
@needs(Capability.CLIP_BY_CALL, Capability.CLIP_ANY_NORM, Capability.COUNTED_UNITS)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_norm_costs_one_reduction(rank: Rank, norm_type: float) -> None:
    """Clipping over a one-dimensional mesh communicates once, and norms only."""
    model = models.Tower(dim=8)
    pair = rank.pair(model, units=model.units(), clip=Clip(max_norm=0.01, norm_type=norm_type))
    pair.step(rank.batch(0, (4, 8)))
    pair.check()
    pair.check_counts("clip", all_reduce=1)
    # At most two numbers of eight bytes for each parameter: norms, not gradients.
    limit = 16 * len(pair.adapter.named_parameters())
    for item in pair.sharded.trace:
        assert item.phase != "clip" or item.nbytes <= limit, f"clipping moved more than norms: {item}"


@contract("CLIPPING-3")
@world(4, 8)
@needs(Capability.CLIP_ANY_NORM, Capability.CLIP_EMPTY_SHARDS)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_empty_shards(rank: Rank, norm_type: float) -> None:
    """Ranks whose shards are empty, of some parameters or of all, take part in the norm all the same."""
    pair = rank.pair(models.two_linear((4, 3), (3, 2)), clip=Clip(max_norm=0.01, norm_type=norm_type))
    for step in range(2):
        pair.step(rank.batch(step, (4, 4)))
        pair.check()


@contract("CLIPPING-4")
@world(4)
@needs(Capability.CLIP_BY_CALL, Capability.CLIP_ANY_NORM, Capability.COUNTED_UNITS, Capability.TENSOR_PARALLEL)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("dim", [16, 17])
def test_two_dimensions(rank: Rank, dim: int, norm_type: float) -> None:
    """The norm of gradients that are cut twice, or by one of two dimensions only, costs one reduction for each."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    model = MLPStack(dim, normed=True)
    pair = rank.pair(
        model,
        units=model.units(),
        mesh=mesh["dp"],
        clip=Clip(max_norm=0.001, norm_type=norm_type),
        prepare=functools.partial(parallelize_mlps, mesh=mesh["tp"], sequence=True),
    )
    for step in range(3):
        pair.step(rank.batch(step, (2, 6, dim), mesh=mesh["dp"]), loss=models.ramp_square)
        pair.check()
        pair.check_counts("clip", all_reduce=2)


@contract("CLIPPING-5")
@world(4)
@needs(Capability.CLIP_BY_CALL, Capability.CLIP_ANY_NORM, Capability.HYBRID, Capability.COUNTED_UNITS)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_replicas(rank: Rank, norm_type: float) -> None:
    """Replicas hold the same gradients: the norm counts them once, and is reduced within a replica."""
    model = models.Tower(dim=8)
    pair = rank.pair(
        model, units=model.units(), mesh=rank.mesh((2, 2), ("replicate", "shard")),
        clip=Clip(max_norm=0.01, norm_type=norm_type),
    )  # fmt: skip
    for step in range(2):
        pair.step(rank.batch(step, (4, 8)))
        pair.check()
        pair.check_counts("clip", all_reduce=1)
