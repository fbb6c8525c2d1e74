"""Ulps, distances and the oracle, against values worked out by hand."""

import ast
import math

import pytest
import torch
from torch import nn

from shardproof.harness.judging.numerics import BASELINE_FACTOR, SLACK_ULPS, distance, ulp
from shardproof.harness.models import optim
from shardproof.harness.parity.oracle import Oracle, total_norm
from tests.harness.inner import ROOT

#: The rooms whose thresholds are constants of ``judging.numerics``.
JUDGING = ("judging", "parity", "training", "watching")
#: Numbers with a point that are no thresholds there, by file.
NO_THRESHOLDS = {
    "parity/oracle.py": {1e-6},  # of the formula of torch's clip_grad_norm_
    "training/doctor.py": {120.0},  # seconds
    "training/invariants.py": {1e-300},  # instead of a division by zero
    "training/norms.py": {1e-300},  # instead of a division by zero
    "training/recording.py": {0.9},  # a part of the bytes
    "training/reference.py": {1e9},  # a unit
    "training/trained_model.py": {1e-2, 1e-3, 0.9},  # the rates of optimizers
    "judging/signatures.py": {0.5},  # a square root
}


def points(source):
    """The numbers of a source that are written with a point or an exponent, but for 0, 1 and 2."""
    numbers = [one.value for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Constant)]
    return {one for one in numbers if isinstance(one, float) and one not in (0.0, 1.0, 2.0)}


def test_all_thresholds_are_in_one_file():
    folder = ROOT / "harness"
    paths = [path for room in JUDGING for path in (folder / room).rglob("*.py") if path.name != "numerics.py"]
    found = {str(path.relative_to(folder)): numbers for path in paths if (numbers := points(path.read_text()))}
    assert found == NO_THRESHOLDS


def test_a_threshold_in_a_condition_is_seen():
    assert points("if abs(x - 1) > 1e-3 or x < 2.5 * y or x ** 2.0: pass") == {1e-3, 2.5}


@pytest.mark.parametrize(
    ("magnitude", "dtype", "expected"),
    [
        (1.0, torch.float32, 2.0**-23), (1.99, torch.float32, 2.0**-23), (2.0, torch.float32, 2.0**-22),
        (0.75, torch.float32, 2.0**-24), (1.0, torch.bfloat16, 2.0**-7), (1.0, torch.float64, 2.0**-52),
        (0.0, torch.float32, 2.0**-126 * 2.0**-23),
    ],
)  # fmt: skip
def test_ulp_is_the_spacing_of_the_dtype(magnitude, dtype, expected):
    """Of nothing, that of the smallest normal number."""
    assert ulp(magnitude, dtype) == expected


def tensors(*values, dtype=torch.float32):
    return [torch.tensor(value, dtype=dtype) for value in values]


def test_distance_counts_ulps_at_the_largest_magnitude():
    sharded, baseline = tensors([1.0, 0.25 + 3 * 2.0**-23], [1.0 + 2.0**-23, 0.25])
    (oracle,) = tensors([1.0, 0.25], dtype=torch.float64)
    result = distance(sharded, baseline, oracle, magnitude=1.0)
    assert (result.sharded_ulps, result.baseline_ulps, result.index) == (3.0, 1.0, 1)
    assert result.allowed_ulps == BASELINE_FACTOR + SLACK_ULPS
    assert not result.is_too_far


def test_scalar_may_err_by_the_slack_more_than_the_baseline():
    sharded, baseline = tensors(1.0 + 9 * 2.0**-23, 1.0 + 2.0**-23)
    (oracle,) = tensors(1.0, dtype=torch.float64)
    result = distance(sharded, baseline, oracle, magnitude=1.0)
    assert (result.allowed_ulps, result.is_too_far) == (1.0 + SLACK_ULPS, False)
    assert distance(sharded + 2.0**-23, baseline, oracle, magnitude=1.0).is_too_far


@pytest.mark.parametrize(("ulps", "too_far"), [(SLACK_ULPS, False), (SLACK_ULPS + 1, True)])
def test_a_perfect_baseline_leaves_the_slack(ulps, too_far):
    sharded, baseline = tensors([1.0 + ulps * 2.0**-23], [1.0])
    result = distance(sharded, baseline, baseline.double(), magnitude=1.0)
    assert result.sharded_ulps == ulps
    assert result.is_too_far is too_far


@pytest.mark.parametrize(
    ("value", "oracle", "too_far"),
    [
        (math.nan, 1.0, True), (math.inf, 1.0, True), (1.0, math.nan, True), (math.nan, math.nan, False),
        (math.inf, math.inf, False),
    ],
)  # fmt: skip
def test_not_finite_agrees_only_with_itself(value, oracle, too_far):
    (sharded,), (expected,) = tensors([value]), tensors([oracle], dtype=torch.float64)
    assert distance(sharded, expected.float(), expected, magnitude=1.0).is_too_far is too_far


def test_empty_pieces_are_no_distance_apart():
    empty = torch.zeros(0, 3)
    assert not distance(empty, empty, empty.double(), magnitude=1.0).is_too_far


@pytest.mark.parametrize(("p", "expected"), [(2.0, 5.0), (1.0, 7.0), (math.inf, 4.0)])
def test_total_norm(p, expected):
    assert float(total_norm(tensors([3.0], [[-4.0]]), p)) == expected
    assert float(total_norm([torch.zeros(0)], p)) == 0.0
    assert float(total_norm([], p)) == 0.0


def test_oracle_keeps_zeroed_gradients_apart_from_forgotten_ones():
    model = nn.ModuleDict({"used": nn.Linear(1, 1, bias=False), "unused": nn.Linear(1, 1, bias=False)})
    model.forward = lambda x: model["used"](x)
    oracle = Oracle(model, optimizer=optim.sgd(), clip=None)
    oracle.model.forward = lambda x: oracle.model["used"](x)
    batches = [[(torch.ones(1, 1),)]]
    assert oracle.step(batches, loss=torch.sum, set_to_none=False).gradients["unused.weight"] is None
    second = oracle.step(batches, loss=torch.sum, set_to_none=False)
    assert second.gradients["used.weight"].item() == 1.0
