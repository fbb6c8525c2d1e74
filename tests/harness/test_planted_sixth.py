"""Bugs that lived where something ran in between, beside replicas and equal sizes fail the cases written for them."""

from __future__ import annotations

import pytest

from tests.harness import planted_sixth as planted
from tests.harness.planted import (
    Killer,
    assert_killed,
    assert_sound_passes,
    cases_of_killers,
    few_by_day,
)

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

KILLED = {
    "each-of-several-gathers-ahead": Killer("test_a_unit_of_several_modules", "4 all_gather instead of 3 in forward"),
    "first-gathers-the-last-ahead": Killer("test_evaluations_add_no_gather and w2-None", "4 all_gather instead of 3"),
    "order-of-the-first-root": Killer("test_ranks_of_the_second_root_differ and original", "raised: ''"),
    "hooks-given-the-replicas": Killer("test_hooks_beside_replicas", "was given meshes of ranks {(0, 2)}"),
    "refused-function-kept": Killer(
        "test_what_cannot_be_combined and a-stream-beside", "the function that was refused runs all the same"
    ),
    "partial-added-to-another": Killer("test_part_used_by_one_microbatch_of_replicas and one-unit", "gradient of"),
    "averages-by-an-equal-factor": Killer("test_sums_alone and w2", "with sums in the second and the fourth step"),
    "hooks-not-run-on-kept-gradients": Killer("test_post_accumulate_hook_runs_once", "runs once in one backward"),
    "frozen-shown-is-undone": Killer("test_frozen_after_an_evaluation and w2-None-shown", "the parameter is frozen"),
    "frozen-shown-is-not-saved": Killer("test_frozen_after_an_evaluation and w4-2-saved", ""),
}

cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=())


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_reference_passes_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
