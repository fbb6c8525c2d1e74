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


def test_norms_whose_powers_leave_float32_are_still_combined() -> None:
    device = torch.device("cpu")
    shares = [clip.local_share([torch.tensor([value])], 2, device, foreach=False) for value in (3e30, 4e30)]
    torch.testing.assert_close(clip.finish(clip.combine(shares, 2), 2, torch.float32), torch.tensor(5e30))


@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_a_nan_anywhere_makes_the_norm_nan(p: float) -> None:
    shares = [
        clip.local_share([torch.tensor([value])], p, torch.device("cpu"), foreach=False) for value in (math.nan, 5.0)
    ]
    for order in (shares, shares[::-1]):
        assert clip.finish(clip.combine(order, p), p, torch.float32).isnan()


def plain_parameters() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(size)) for size in (3, 5)]
    for index, param in enumerate(params):
        param.grad = torch.arange(1.0, param.numel() + 1) * (index + 1)
    return params


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("p", [1, 2, 3, "inf"])
def test_plain_gradients_are_clipped_as_by_torch(p: float, foreach: bool | None) -> None:
    ours, theirs = plain_parameters(), plain_parameters()
    total = clip_grad_norm_(ours, 0.5, p, foreach=foreach)
    torch.testing.assert_close(total, torch.nn.utils.clip_grad_norm_(theirs, 0.5, float(p)))
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)


@pytest.mark.parametrize("p", [-1, math.nan, -math.inf])
def test_a_norm_that_is_none_is_refused_by_its_value(p: float) -> None:
    with pytest.raises(ValueError, match=f"at least 0, not {p}"):
        clip_grad_norm_(plain_parameters(), 1.0, p)


def test_nonfinite_norms_are_errors_on_request() -> None:
    params = plain_parameters()
    assert params[0].grad is not None
    params[0].grad[0] = math.inf
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 .* non-finite \(inf\)"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


def test_half_precision_gradients_have_a_float32_norm() -> None:
    param = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    param.grad = torch.full((4,), 6e4, dtype=torch.float16)
    total = clip_grad_norm_(param, 1.0)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, torch.tensor(1.2e5), rtol=1e-3, atol=0)


def test_nothing_to_clip_has_norm_zero() -> None:
    assert clip_grad_norm_([], 1.0) == 0
    assert clip_grad_norm_(nn.Parameter(torch.ones(2)), 1.0) == 0
