"""Bugs that only several options together, or hash seeds of each rank, show each fail the case written for them."""

from __future__ import annotations

import pytest

from tests.harness import planted_fresh as planted
from tests.harness.planted import (
    Killer,
    assert_killed,
    assert_sound_passes,
    cases_of_killers,
    few_by_day,
)

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

CALLS = "test_answers and w2-{}"
AHEAD = "test_evaluations_gather_ahead"
DTYPES = "test_averages_in_two_dtypes and {}"
STATES = "test_states_with_own_hash_seeds and w2-{}"
FULL = "test_evaluation_in_full_precision and None"
KILLED = {
    "flat-shared-taken-twice": Killer("test_parameter_of_two_units and flat-two-units", "diverges"),
    "flat-frozen-goes-on": Killer("test_flat_frozen_between_steps and None", ""),
    "flat-unreduced-whole-not-shown": Killer("test_gradients_that_a_script_drops and all-flat", "gradient of"),
    "flat-recurrent-stale": Killer("test_recurrent_module and None-flat", ""),
    "flat-norm-of-other-elements": Killer("test_two_dimensions and flat-16-2.0 and clipping", "norm"),
    "flat-cast-before-the-change": Killer("test_changes_of_what_is_whole_in_another_dtype and step", "has cast"),
    "flat-order-of-replicas-not-compared": Killer("test_ranks_that_shard_nothing_differ and original", ""),
    "flat-new-data-of-replicas-not-used": Killer("test_new_data_of_what_is_whole and w2-flat", "does not use new data"),
    "flat-nothing-ahead-in-evaluation-mode": Killer("test_steps_in_evaluation_mode", "in training mode"),
    "flat-buffers-of-a-part-stay": Killer("test_a_part_in_full_precision", "where the first trains"),
    "flat-unreduced-of-flat-lost": Killer("test_full_precision_between_microbatches and w2-flat", ""),
    "flat-buffers-stay-low": Killer(FULL, "in evaluations the dtypes are"),
    "flat-buffers-of-the-last-module": Killer(FULL, "in evaluations the dtypes are"),
    "flat-mode-of-the-wrapper": Killer("test_a_part_in_full_precision", "where the first trains"),
    "flat-evaluations-gather-nothing-ahead": Killer(AHEAD, "are gathered"),
    "flat-evaluations-not-recorded": Killer(AHEAD, ""),
    "flat-first-steps-in-backward": Killer("test_steps_in_backward and None", "leaves gradients of"),
    "flat-reduced-late-after-a-cast": Killer("test_order_after_a_cast", "without an evaluation"),
    "flat-order-of-forwards-kept": Killer("test_steps_with_an_unused_output", "the first step"),
    "flat-low-gradients-widened-by-a-move": Killer("test_gradients_that_stay and moves-fp32-bf16-original", "dtype"),
    "flat-divided-by-the-dtype-of-compute": Killer(DTYPES.format("half-to-float-shards"), "15 / 4"),
    "flat-divided-by-the-dtype-of-shards": Killer(DTYPES.format("float-to-half-4x1"), "15 / 4"),
    "flat-children-wiped": Killer("test_values_made_on_the_meta_device and reset-whole-model", ""),
    "flat-absent-buffers-cast": Killer("test_buffers and precision and True", "NoneType"),
    "flat-buffers-in-the-dtype-of-before": Killer("test_buffers_of_a_model_that_is_cast", "is saved in"),
    "flat-first-wrapper-takes-the-form": Killer(CALLS.format("in-a-plain-module"), "the same state dict settings"),
    "flat-first-of-all-ranks-saves": Killer("test_answers_of_replicas", "of whole values this rank"),
    "flat-cut-values-not-written": Killer("test_whole_parameters_beside_tensor_parallelism", ""),
    "flat-aligned-for-floats": Killer(CALLS.format("bytes-past-alignment"), "instead of"),
    "flat-states-of-a-set": Killer(STATES.format("originals-full"), "has other values than on the first rank"),
    "flat-states-loaded-by-a-set": Killer(STATES.format("flat-sharded"), "what ranks hold differs"),
    "flat-names-loaded-by-a-set": Killer(STATES.format("originals-sharded"), ""),
    "flat-values-saved-by-a-set": Killer(STATES.format("flat-sharded"), "the state dicts of ranks have"),
    "flat-values-loaded-by-a-set": Killer(STATES.format("flat-sharded"), ""),
    "flat-first-values-by-a-set": Killer("test_start_with_own_hash_seeds and w2-originals", ""),
    "flat-units-by-a-set": Killer("test_waiting_units_with_own_hash_seeds and w2-flat", ""),
    "laid-out-by-a-set-of-names": Killer("test_steps_with_own_hash_seeds and w2-None-originals", "diverges"),
    "laid-out-by-a-set-of-dtypes": Killer("test_dtypes_with_own_hash_seeds", "than it was given"),
    "units-by-a-set": Killer("test_waiting_units_with_own_hash_seeds and w2-originals", ""),
    "norm-by-a-set-of-groups": Killer("test_two_dimensions_with_own_hash_seeds and originals", "total norm"),
}

cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
