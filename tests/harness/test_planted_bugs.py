"""A wrong implementation is caught by the suites, and the message says what is wrong and where."""

from __future__ import annotations

import pytest

from tests.harness import planted

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which each planted bug has ranks of its own")

BUGS = [
    planted.ForgottenDivision,
    planted.DroppedReduction,
    planted.AverageIsSum,
    planted.LocalNorm,
    planted.SecondGather,
]
CASES = "test_counts_and_bytes and w2 and None or test_norm_costs_one_reduction and w2 and 2.0"


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return planted.failures_of(BUGS, CASES, tmp_path_factory.mktemp("planted"))


def test_the_sound_reference_passes_the_same_cases(failures):
    assert failures["reference"] == {"test_counts_and_bytes": None, "test_norm_costs_one_reduction": None}


@pytest.mark.parametrize("bug", [planted.ForgottenDivision, planted.AverageIsSum])
def test_a_sum_for_an_average(failures, bug):
    failure = failures[bug.__name__]["test_counts_and_bytes"]
    assert (failure["stage"], failure["step"], failure["rank"]) == ("gradient", 0, 0)
    assert failure["name"] == "layers.0.in_proj.bias"
    assert "gradient of 'layers.0.in_proj.bias' in the first step (step 0) on rank 0 element [" in failure["text"]
    assert "2 times the oracle's everywhere" in failure["text"]
    assert "the same stage diverges on rank 1 as well" in failure["text"]


def test_a_dropped_reduction_of_one_unit(failures):
    failure = failures["DroppedReduction"]["test_counts_and_bytes"]
    assert (failure["stage"], failure["name"]) == ("gradient", f"{planted.DROPPED_UNIT}.in_proj.bias")
    assert "this rank's own gradient" in failure["text"]
    assert "the reduction over the ranks is missing" in failure["text"]


def test_a_norm_that_is_not_reduced(failures):
    failure = failures["LocalNorm"]["test_norm_costs_one_reduction"]
    assert (failure["stage"], failure["rank"]) == ("total norm", 0)
    assert "the norm of what this rank alone holds" in failure["text"]
    assert failures["LocalNorm"]["test_counts_and_bytes"] is None


def test_a_second_gather(failures):
    failure = failures["SecondGather"]["test_counts_and_bytes"]
    assert (failure["stage"], failure["rank"]) == ("collectives in forward", 0)
    assert failure["name"] == planted.GATHERED_TWICE
    assert "5 all_gather instead of 4 in forward" in failure["text"]
    assert f"{planted.GATHERED_TWICE} 2" in failure["text"]
