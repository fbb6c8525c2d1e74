"""Bugs of the per-parameter reference in settings and forms of parameters each fail the case written for them."""

from __future__ import annotations

import pytest

from tests.harness import planted_fourth as planted
from tests.harness.planted import (
    Killer,
    assert_killed,
    assert_sound_passes,
    cases_of_killers,
    few_by_day,
)

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

UNFIT = "test_what_cannot_be_sharded and w2-{}"
KILLED = {
    "frozen-where-resharded": Killer("test_frozen_after_an_evaluation and w4-2-shown", ""),
    "frozen-not-clipped": Killer("test_some_parameters and one-lists", "the norm of"),
    "gradients-as-the-first": Killer("test_frozen_of_another_dtype and w2-None", ""),
    "shards-of-a-replica-kept": Killer("test_size_of_the_mesh and w4-True", "other parameters than the optimizer's"),
    "sizes-of-all-replicas-taken": Killer(UNFIT.format("a-size-of-all-replicas"), ""),
    "groups-of-the-others": Killer("test_resharded_within_half_the_ranks and every-other", ""),
    "first-dimension-evenly": Killer("test_layout and w2-True-False", "uneven"),
    "set-while-sharded-alone": Killer("test_after_forwards_of_two_settings and w2", "gathered is"),
    "keywords-of-methods-lost": Killer("test_forward_methods_of_one_class", ""),
    "no-limit-at-all": Killer("test_some_parameters and one-no-norm-at-all", "the norm of"),
    "wide-floats-not-cast": Killer("test_masks_and_rotations and float64", "the unit got"),
    "failed-end-counts": Killer("test_first_forward_that_raises and order-original", ""),
    "units-at-the-end-unmentioned": Killer(
        "test_later_iterations_run_other_units and goes-on-original", "should have been warned"
    ),
    "one-place-of-two-forgotten": Killer("test_evaluation_between_forward_and_backward and twice", ""),
    "one-input-padded": Killer("test_inputs_without_padding and one-of-two", ""),
    "gathered-for-hooks-kept": Killer("test_what_a_hook_makes_is_freed and object", "what was gathered"),
}

cases = cases_of_killers(KILLED, planted.ADAPTERS, flat={})


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_reference_passes_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
