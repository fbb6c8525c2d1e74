"""Bugs in corners of containers and hooks, of evaluations and of layout each fail the case that shows them."""

from __future__ import annotations

import pytest

from tests.harness import planted_seventh as planted
from tests.harness.planted import (
    Killer,
    assert_killed,
    assert_sound_passes,
    cases_of_killers,
    few_by_day,
)

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

KILLED = {
    "columns-of-nothing": Killer("test_parameter_without_rows and w2 and placement", "division"),
    "targets-for-inference-alone": Killer("test_other_dimensions_after_inference_mode", "inference tensor"),
    "all-move-with-one": Killer("test_state_dict_follows_parameters and w2-one-parameter", "has values of before"),
    "cast-by-size": Killer("test_dtypes_of_one_size and fp16-to-bf16", "type"),
    "shards-that-waited-not-summed": Killer("test_reduction_over_replicas_waits and all-reduce-all", "diverges"),
    "graphs-dropped-without-autograd": Killer("test_gradients_of_gradients and None-False", "have no graph"),
    "smaller-shards-outlive-a-step": Killer("test_loading_a_part and w4-2-layers.0.gain", "has other values"),
    "prefetched-all-the-same": Killer("test_backward_gathers_a_unit_or_not and a-layer", "backward gathers"),
    "hook-lost-with-the-view": Killer("test_output_changed_in_place and w2", "setStorage"),
    "one-input-for-each-tensor": Killer("test_inputs_by_keyword and w2 and not order", "StopIteration"),
    "dataclasses-made-anew": Killer("test_classes_of_containers and late-dataclass", "made anew"),
    "one-name-can-be-copied": Killer("test_copies_of_states", "invalid python storage"),
    "units-own-units": Killer("test_deleted_model_is_freed_at_once and after-a-step-None", "are alive"),
}

cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=())


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
