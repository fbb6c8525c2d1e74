"""Chapter PRECISION: dtypes of compute, reduction and output."""

from __future__ import annotations

import pytest
import torch

from shardproof.harness import Capability, contract, needs, world
from shardproof.harness.findings.finding import step_label
from shardproof.harness.models import shapes
from shardproof.harness.parity import Rank, exact_difference

pytestmark = needs(Capability.CAST_AFTER_INIT)

ROWS = 7
#: Twice the smallest float16.
TINY = 2.0**-23
#: Of the gradients of all ranks; the largest float16 is 65504.
LARGE_SUM = 81920


@contract("PRECISION-4")
@world(2, 4)
def test_sums_beyond_float16(rank: Rank) -> None:
    """The average of float16 gradients is right, although their sum is no float16."""
    average(rank, None)


@contract("PRECISION-4")
@world(4)
@needs(Capability.HYBRID)
@pytest.mark.parametrize(
    "shape", [(2, 2), pytest.param((4, 1), marks=needs(Capability.SINGLE_RANK))], ids=["2x2", "4x1"]
)
def test_sums_of_replicas_beyond_float16(rank: Rank, shape: tuple[int, int]) -> None:
    """The same where the sum is taken over the shards, over the replicas or over both."""
    average(rank, shape)


def average(rank: Rank, shape: tuple[int, int] | None) -> None:
    """Two backwards, the second of which adds to gradients of zeros.

    The sum of the large gradients is no float16 unless a part of the division precedes it. The small ones are lost if
    all of the division does, at four ranks. Every partial sum is exact, in any order.
    """
    size = rank.world_size
    mesh = rank.mesh(shape, ("replicate", "shard")) if shape else None
    run = rank.run(shapes.TwoScales(ROWS, 4, 4), units=[["low"]], mesh=mesh, cast=torch.float16)
    mine, averaged = torch.full((2, ROWS, 4), TINY, dtype=torch.float16, device=rank.device)
    averaged[::2] = LARGE_SUM / size
    mine[::2] = LARGE_SUM / size + 64 * (rank.index - (size - 1) / 2)
    for step in range(2):
        run.forward_backward((mine,), loss=torch.sum)
        for name, piece in run.adapter.gradients().items():
            where = f"gradient of {name!r} in {step_label(step)}"
            assert piece is not None, f"{where}: there is none"
            assert piece.tensor.dtype == torch.float16, f"{where}: it is of {piece.tensor.dtype}"
            difference = exact_difference(piece.tensor, piece.cut(averaged))
            assert difference is None, f"{where}: element, gradient and average of the ranks: {difference}"
        run.adapter.zero_grad(set_to_none=False)
    other = [str(item) for item in run.trace if item.dtype != "float16"]
    assert not other, f"the parameters are of float16, these collectives are not: {other}"
