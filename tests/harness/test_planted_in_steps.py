"""Bugs that only several microbatches, replicas or prefetching show are caught by the cases about those."""

from __future__ import annotations

import pytest

from tests.harness import planted

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow("the tests share one run of the suites, in which each planted bug has ranks of its own"),
]

BUGS = [planted.LonelyReplicas, planted.ReplacedGradient, planted.DeafToPrefetch, planted.ForgottenFlags]
CASES = (
    "test_reduction_waits and w2-root-only-True-None or test_hybrid_parameters_stay_gathered and all-reduce-all "
    "or test_prefetch and test_order"
)


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return planted.failures_of(BUGS, CASES, tmp_path_factory.mktemp("planted"))


def caught(failures, bug):
    return {case: failure["text"] for case, failure in failures[bug.__name__].items() if failure}


def test_the_sound_reference_passes_the_same_cases(failures):
    assert failures["reference"] == {
        "test_reduction_waits": None,
        "test_hybrid_parameters_stay_gathered": None,
        "test_order": None,
    }


def test_replicas_that_do_not_reduce(failures):
    found = caught(failures, planted.LonelyReplicas)
    assert found.keys() == {"test_hybrid_parameters_stay_gathered"}
    assert f"gradient of '{planted.DROPPED_UNIT}.in_proj.bias' in the first step (step 0)" in found.popitem()[1]


def test_a_gradient_that_is_not_added(failures):
    found = caught(failures, planted.ReplacedGradient)
    assert found.keys() == {"test_reduction_waits"}
    assert "gradient of 'layers.0.in_proj.bias' in the first step (step 0)" in found.popitem()[1]


def test_units_that_do_not_gather_ahead(failures):
    found = caught(failures, planted.DeafToPrefetch)
    assert found.keys() == {"test_order"}
    told = "computes in the evaluation before the first step (step 0) before these are gathered: layers.1, layers.2"
    assert told in found.popitem()[1]


def test_units_that_do_not_wait(failures):
    found = caught(failures, planted.ForgottenFlags)
    assert found.keys() == {"test_reduction_waits", "test_hybrid_parameters_stay_gathered"}
    assert "12 reduce_scatter instead of 10 in backward" in found["test_reduction_waits"]
    assert "all_gather instead of 4 in forward" in found["test_hybrid_parameters_stay_gathered"]
