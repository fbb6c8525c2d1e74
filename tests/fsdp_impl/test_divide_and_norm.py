"""The arithmetic behind averages and norms, without ranks."""

import math

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp

from fsdp_impl import clip_grad_norm_
from fsdp_impl.common import clip
from fsdp_impl.common.divide import divide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_dtypes_are_averaged_by_the_collective(dtype: torch.dtype) -> None:
    division = divide(dtype, 4)
    assert (division.before, division.reduce_op, division.after) == (1, ReduceOp.AVG, 1)
    assert divide(dtype, 1).reduce_op == ReduceOp.SUM


@pytest.mark.parametrize("world, before", [(1, 1), (2, 2), (3, 2), (4, 2), (6, 4), (8, 4), (16, 4), (64, 8), (256, 16)])
def test_float16_is_divided_around_the_sum(world: int, before: int) -> None:
    division = divide(torch.float16, world)
    assert division.reduce_op == ReduceOp.SUM
    assert division.before == before
    assert division.before * division.after == world


@pytest.mark.parametrize("p", [0, 0.5, 1, 2, 3, 10, math.inf])
def test_shares_of_pieces_make_the_norm_of_the_whole(p: float) -> None:
    torch.manual_seed(0)
    whole = torch.randn(50, dtype=torch.float64)
    whole[3] = 0
    shares = [clip.local_share([piece], p, whole.device, foreach=False) for piece in [*whole.split(7), whole[:0]]]
    total = clip.finish(clip.combine(shares, p), p, torch.float64)
    torch.testing.assert_close(total, torch.linalg.vector_norm(whole, p))


@pytest.mark.parametrize("p", [-1, math.nan, -math.inf])
def test_a_norm_that_is_none_is_refused_by_its_value(p: float) -> None:
    with pytest.raises(ValueError, match=f"at least 0, not {p}"):
        clip_grad_norm_(nn.Parameter(torch.ones(2)), 1.0, p)
