"""Units that are freed too late, and wrong optimizer state, are caught by the cases about them."""

from __future__ import annotations

import pytest

from tests.harness import planted, planted_memory

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which each planted bug has ranks of its own")

BUGS = [
    planted_memory.KeepsBytesAfterForward,
    planted_memory.KeepsUnusedUnits,
    planted_memory.KeepsBytesAfterBackward,
    planted_memory.DoubledMomentum,
]
CASES = (
    "w2 and (test_units_are_freed_behind_the_computation and True or test_first_step_of_adam and for-loop-adamw or "
    "False and (test_everything_is_freed_when_backward_ends or test_unused_output_keeps_other_gradients))"
)


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return planted.failures_of(BUGS, CASES, tmp_path_factory.mktemp("planted"))


def caught(failures, bug):
    return {case: failure["text"] for case, failure in failures[bug.__name__].items() if failure}


def test_the_sound_reference_passes_the_same_cases(failures):
    assert len(failures["reference"]) >= 4
    assert set(failures["reference"].values()) == {None}


def test_bytes_that_are_kept_after_forward(failures):
    text = caught(failures, planted_memory.KeepsBytesAfterForward)["test_units_are_freed_behind_the_computation"]
    assert "when the forward of layers.1 begins in the first step (step 0), these units are done with and" in text
    assert "still gathered (bytes): {'layers.0': " in text


def test_a_unit_without_gradients_that_is_not_freed(failures):
    found = caught(failures, planted_memory.KeepsUnusedUnits)
    text = found["test_everything_is_freed_when_backward_ends"]
    assert "when the backward of the second step (step 1) has ended, units are gathered (bytes): {'head1': " in text
    # No picture reshards it any more.
    assert "gathered are head1.weight, head1.bias" in found["test_unused_output_keeps_other_gradients"]


def test_bytes_that_are_kept_after_backward(failures):
    text = caught(failures, planted_memory.KeepsBytesAfterBackward)["test_units_are_freed_behind_the_computation"]
    assert "when the backward of layers.3 begins in the first step (step 0), these units are done with and" in text


def test_optimizer_state_is_compared(failures):
    found = caught(failures, planted_memory.DoubledMomentum)
    assert found.keys() == {"test_first_step_of_adam"}
    text = found["test_first_step_of_adam"]
    assert "optimizer state of 'layers.0.in_proj.bias: exp_avg' in the first step (step 0) on rank 0" in text
