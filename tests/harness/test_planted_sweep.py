"""Bugs that a sweep of one-place changes found to live each fail the case written for them."""

from __future__ import annotations

import pytest

from tests.harness import planted_sweep as planted
from tests.harness.planted import (
    Killer,
    assert_killed,
    assert_sound_passes,
    cases_of_killers,
    few_by_day,
)

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

SEVERAL = "test_several_tensors_of_one_unit and {}"
WHOLE = "test_whole_states_beside_tensor_parallelism"
KILLED = {
    "factor-by-an-earlier-name": Killer("test_divide_factor_of_another_step and older_divide", "gradient"),
    "flat-rule-for-all-does-not-wrap": Killer("test_answers and wrapped-everywhere", "instead of"),
    "flat-wrapped-by-hand-is-lost": Killer("test_answers and wrapped-everywhere", "instead of"),
    "flat-rule-without-a-text": Killer("test_answers and text-of-a-rule", "TypeError"),
    "memory-apart-for-the-last": Killer(SEVERAL.format("class"), "a gathered tensor begins at"),
    "dimensions-of-the-last": Killer(SEVERAL.format("object"), "list index out of range"),
    "last-hook-not-called": Killer(SEVERAL.format("object"), "AssertionError"),
    "lists-copied": Killer("test_things_that_units_fill and w2-list]", "added 0 of 2 entries"),
    "dicts-copied": Killer("test_things_that_units_fill and w2-dict]", "added 0 of 2 entries"),
    "objects-copied": Killer("test_things_that_are_no_tensors", "took the place of ['Notes'"),
    "inputs-without-gradients-copied": Killer("test_tensors_that_need_no_gradient", "that need no gradient, as given"),
    "inputs-in-place-unnoticed": Killer("test_input_changed_in_place and True", "gradient"),
    "batch-without-rows-is-no-input": Killer("test_batch_without_rows and w2", ""),
    "flat-plain-parts-are-cut": Killer("test_unit_that_is_cut_in_part and flat-2.0", ""),
    "flat-own-columns-saved": Killer(WHOLE, ""),
    "flat-states-of-own-columns-saved": Killer(WHOLE, ""),
}

cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
