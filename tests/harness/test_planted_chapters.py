"""Bugs planted for requirements that no other file has a bug for each fail the case that checks them."""

from __future__ import annotations

import pytest

from tests.harness import planted_chapters as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers, few_by_day

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

GRADIENT, OUTPUT = "gradient of '", "output of 'microbatch 0"
KILLED = {
    "unused-get-zeros": Killer("test_unused_module_gets_no_gradient and w2-None", ""),
    "named-tuples-become-tuples": Killer("test_containers_between_units and w2-namedtuple", ""),
    "one-hook-alone": Killer("test_optimizer_in_hook_equals", ""),
    "second-forward-not-gathered": Killer("test_two_forwards_before_one_backward and w2-None", "storage of size 0"),
    "kept-after-a-dropped-forward": Killer("test_dropped_forward and w2-None", ""),
    "first-unit-gathers-all": Killer("test_after_partial_forward and w2-True", ""),
    "average-is-a-sum": Killer("test_many_units and w2-undelayed-None", GRADIENT),
    "sum-of-different-batches": Killer("test_batches_of_different_sizes and w2", GRADIENT),
    "gradients-of-two-models-add-up": Killer("test_generator_and_critic and w2-critic-kept", ""),
    "backward-not-hooked": Killer("test_saved_tensors_are_packed and w2-False-None", ""),
    "second-call-not-gathered": Killer("test_unit_called_twice and w2-chained-True", ""),
    "cast-not-noticed": Killer("test_cast_after_sharding and sets-data", ""),
    "no-inputs-not-reduced": Killer("test_root_without_inputs and w2-None", ""),
    "dtype-of-the-first-step": Killer("test_thawed_unit and fp32-bf16", ""),
    "one-rank-reduces": Killer("test_no_collectives_alone", ""),
    "gathers-twice": Killer("test_bytes_of_a_step and w2-None", "bytes"),
    "gathers-what-is-gathered": Killer("test_forwards_run_ahead and 0-True-True", "all_gather instead of"),
    "neighbours-of-another-replica": Killer("test_resharded_within_a_replica", ""),
    "replicas-are-made-alike": Killer("test_what_crosses_hosts and cyclic-None-False", "it crosses hosts"),
    "neighbours-of-another-host": Killer("test_resharded_within_a_host and cyclic", "those of this host"),
    "inputs-saved-for-backward": Killer("test_saved_tensors_are_packed and w2-False-None", "elements, and"),
    "inputs-of-one-size": Killer("test_batches_of_other_sizes and on-change-None", "graphs after each step"),
    "new-parameters-each-time": Killer("test_root_compiled_after_sharding and None", ""),
    "tied-counted-twice": Killer("test_tied_parameters_move_once and None", ""),
    "unsharded-are-plain": Killer("test_composition and test_two_dimensions and 16-False-None", ""),
    "pending-sums-not-summed": Killer("test_composition and test_transformer and sequence", ""),
    "gradients-of-one-kind": Killer("test_parameters_of_both_kinds and None-None-False", GRADIENT),
    "flat-one-rank-reduces": Killer("test_no_collectives_alone", ""),
    "flat-gathers-twice": Killer("test_bytes_of_a_step and w2-None", "bytes"),
    "flat-steps-in-what-was-loaded": Killer(
        "test_whole_state_dicts_are_copies and w2-full-originals", "what was loaded"
    ),
    "flat-saving-gathers": Killer("test_saving_changes_nothing and w2-True-saves-originals-sharded", ""),
    "flat-rows-misplaced": Killer("test_resume and test_two_dimensions and sequence-adam-new", ""),
}


cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
