"""Chapter REDUCTION: how gradients are averaged."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.adapters.base import Clip, Precision
from shardproof.harness.findings.finding import step_label
from shardproof.harness.models import mixed, optim
from shardproof.harness.parity import Rank, check_equal, run_and_replica
from shardproof.harness.plugin.axes import RESHARD

SHAPE = (6, 4)
LOW = needs(Capability.MIXED_PRECISION)


@contract("REDUCTION-1")
@world(2, 4)
@needs(Capability.DIVIDE_FACTOR)
@pytest.mark.parametrize("dtype", [None, pytest.param(torch.float16, marks=LOW)], ids=["float32", "float16"])
@pytest.mark.parametrize(
    "factors", [{"low": 1.0, "high": 16.0, "": 8.0}, {"high": 8.0}], ids=["of-all-units", "of-one-unit"]
)
def test_divide_factors(rank: Rank, factors: dict[str, float], dtype: torch.dtype | None) -> None:
    """The sum over shards and replicas together is divided by the factor of the unit, or else by the ranks."""
    # Four ranks are (2, 2), because the order of a sum of two does not matter.
    mesh = rank.mesh((2, 2), ("replicate", "shard")) if rank.world_size == 4 else None
    model = mixed.Mixed()
    # All gradients are far from the smallest float16, so that a part of the division before the sum loses nothing.
    for value in (*model.parameters(), model.low.offset, model.high.offset):
        value.data.abs_().add_(1)
    run, replica = run_and_replica(
        rank,
        model,
        units=[["low"], ["high"]],
        mesh=mesh,
        optimizer=optim.sgd(lr=2.0**-10),
        divide_factors=factors,
        precision=Precision(reduce=dtype),
    )
    for step in range(2):
        batch = [(rank.batch(step, SHAPE).abs() + 1,)]
        expected = replica.step(batch, loss=torch.sum)
        check_equal(rank, run, run.step(batch, loss=torch.sum), expected, number=step)


@contract("REDUCTION-3")
@world(2, 4)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_stays_in_its_element(rank: Rank, value: float) -> None:
    """A NaN or an inf in one rank's gradient reaches that element of the average, and no other."""
    run = rank.run(mixed.Mixed(), units=[["low"], ["high"]])
    place = (1, 2)
    for step in range(2):
        x = rank.batch(step, SHAPE)
        if rank.index == 1:
            x[place] = value
        run.forward_backward((x,), loss=torch.sum)
        nothing = torch.zeros(SHAPE, dtype=torch.bool, device=rank.device)
        hit = nothing.clone()
        hit[place] = True
        for name, piece in run.adapter.gradients().items():
            # With flat parameters a rank has no gradient of what it holds no element of.
            if piece is None:
                continue
            # The gradient of what is added does not depend on the input.
            expected = piece.cut(nothing if name.endswith("shift") else hit)
            found = ~piece.tensor.isfinite()
            where = f"gradient of {name!r} in {step_label(step)}: not finite are {int(found.sum())} elements"
            assert torch.equal(found, expected), f"{where} of this rank's part instead of {int(expected.sum())}"
        run.adapter.zero_grad(set_to_none=True)


@contract("REDUCTION-3")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_fresh_memory_is_not_read(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """What memory holds when it is allocated reaches no gradient, no norm and no parameter."""
    model = models.Tower(dim=9)
    pair = rank.pair(
        model,
        units=model.units(),
        reshard_after_forward=reshard_after_forward,
        clip=Clip(0.01) if Capability.CLIPPING in rank.implementation.capabilities() else None,
    )
    for step in range(3):
        with memory_of_nan():
            pair.step(rank.batch(step, (4, 9)))
        pair.check()


@contextlib.contextmanager
def memory_of_nan() -> Iterator[None]:
    """Fill every new tensor without values with NaN, as torch does while algorithms must be deterministic."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
