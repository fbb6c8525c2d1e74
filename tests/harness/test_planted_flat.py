"""Bugs of the flat half alone each fail the case that was written for them, in one run."""

from __future__ import annotations

import pytest

from tests.harness import planted_flat as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers, few_by_day

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

WHOLE, MADE = "test_whole_on_every_rank and {}", "test_values_made and w2-reset-whole-model"
NEW_DATA = "test_new_data_after_an_evaluation and {}"
OPTIONS = "test_units_have_the_options and {}"
KILLED = {
    "replicas-not-averaged": Killer(WHOLE.format("w2-originals"), "gradient of '"),
    "replicas-are-shards": Killer(WHOLE.format("w2-originals"), ""),
    "replicas-reduced-after-the-hook": Killer(
        "test_function_in_place and w2-replicas-alone", "the implementation reduces"
    ),
    "whole-values-are-views": Killer(
        "test_whole_state_dicts_are_copies and full-replicas-alone-originals", "the step changed"
    ),
    "no-buffer-for-another-dtype": Killer(WHOLE.format("in_another_dtype"), ""),
    "found-units-not-kept": Killer(OPTIONS.format("keeps"), "backward gathers ["),
    "found-units-not-sent": Killer(OPTIONS.format("first-rank"), "other values than those of the option"),
    "found-units-reset": Killer(OPTIONS.format("function"), "other values than those of the option"),
    "gaps-not-filled": Killer("test_states_of_the_first_rank_everywhere and w4-False", "not those of the first rank"),
    "options-of-all-parameters-alone": Killer(
        "test_into_an_optimizer_of_fewer_parameters and w2-full", "learning rates ["
    ),
    "new-data-not-seen": Killer(NEW_DATA.format("w2-None-all"), "output of 'evaluation"),
    "new-flat-data-not-seen": Killer(NEW_DATA.format("w2-None-flat"), "output of 'evaluation"),
    "new-data-dropped": Killer(NEW_DATA.format("w2-None-all"), "output of 'evaluation"),
    "new-data-seen-by-holders": Killer(NEW_DATA.format("w2-None-last"), ""),
    "new-data-forgotten-by-reading": Killer(NEW_DATA.format("w2-None-read"), ""),
    "unreduced-dropped-by-an-evaluation": Killer(
        "test_evaluation_between_microbatches and w2-None-True", "gradient of '"
    ),
    "unreduced-dropped-by-a-cast": Killer("test_full_precision_between_microbatches and w2-None", "gradient of '"),
    "memory-of-before-the-cast": Killer(
        "test_cast_after_an_evaluation and w2-replicas-alone", "mat1 and mat2 must have the same dtype"
    ),
    "whole-values-of-compute": Killer(
        "test_precision and test_whole_parameters and w2-originals", "is of torch.bfloat16"
    ),
    "reduces-low-in-evaluation": Killer("test_gradients_in_full_precision and w2-bf16-None", "gradient of '"),
    "norm-of-the-first-dtype": Killer("test_gradients_of_two_dtypes and w4-float64-32-2.0", "total norm"),
    "ignored-are-made": Killer("test_ignored_module and w2-reset", "of the ignored module has other values"),
    "ignored-are-cast": Killer("test_ignored_module and w2-reset", "of the ignored module is of torch.bfloat16"),
    "buffers-alone-stay": Killer(MADE, ""),
    "ignored-not-scaled": Killer("test_ignored_parameter and w2-2.0", "clipped gradient of 'low.weight'"),
    "applied-is-lost": Killer("test_function_for_every_module and w2-shards-originals", "has other values"),
    "loads-as-it-lies": Killer("test_other_strides and w2-shards-full", "element ["),
    "cast-loses-gradients": Killer("test_cast_there_and_back and w2-before-the-step", "two runs that should be equal"),
    "cast-loses-new-data": Killer("test_cast_there_and_back and w2-after-new-data", "two runs that should be equal"),
    "whole-have-names-of-wrappers": Killer(
        "test_whole_parameters and w2-None-read-originals", "the model names its parameters"
    ),
    "mesh-of-the-replicas": Killer("test_sharded_states_of_groups_of_replicas", ""),
    "ignored-states-not-saved": Killer("test_states_of_ignored_parameters and w2-full", "layers.0.second.bias"),
    "ignored-states-not-loaded": Killer("test_states_of_ignored_parameters and w2-full", "layers.0.second.bias"),
    "first-name-of-a-module": Killer("test_module_with_two_names and w2-full", "'layers.0.again.weight'"),
}


cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
