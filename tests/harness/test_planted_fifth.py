"""Bugs that an independent reader wrote into the flat reference each fail the case written, or sharpened, for them."""

from __future__ import annotations

import pytest

from tests.harness import planted_fifth as planted
from tests.harness.planted import (
    Killer,
    assert_killed,
    assert_sound_passes,
    cases_of_killers,
    few_by_day,
)

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

CALLS = "test_answers and w2-{}"
REFUSED = "test_what_cannot_be_combined and w2-{}"
KILLED = {
    "first-rank-scrambles-columns": Killer(
        "test_states_of_the_first_rank_everywhere and False", "not those of the first rank"
    ),
    "loaded-in-another-order": Killer("test_other_strides and w2-shards-full", ""),
    "bounds-that-differ": Killer(REFUSED.format("other-bounds-inside"), "no rank refuses it"),
    "any-configuration-of-optimizers": Killer(
        REFUSED.format("an-optimizers-configuration-of-sharded-ones"), "no rank refuses it"
    ),
    "paths-not-clean-at-their-end": Killer(CALLS.format("names-of-what-is-recomputed"), "_checkpoint_wrapped_module"),
    "older-call-of-no-group": Killer("test_answers_of_replicas", "of its replica, or of all again, saves"),
    "first-root-alone": Killer(CALLS.format("in-a-plain-module"), "in-a-plain-module"),
    "root-casts-by-its-own-setting-alone": Killer(CALLS.format("casts-of-the-root"), "casts-of-the-root"),
    "interrupts-not-abandoned": Killer("test_interrupt and w2-forward", "after an exception in forward"),
    "hybrid-frees-between-microbatches": Killer("test_hybrid_parameters_stay_gathered and reduction-all", ""),
    "not-in-the-last-microbatch": Killer("test_part_used_by_one_microbatch and own-units-deferred", ""),
    "recomputation-gathers-the-next": Killer(
        "test_one_gather_serves_both and w2-True-None-reentrant-call", "all_gather"
    ),
    "gathered-before-always": Killer("test_when_backward_gathers_ahead and w2-after-backward", "are gathered"),
    "frozen-while-gathered": Killer("test_frozen_after_an_evaluation and w2-False-held", ""),
    "groups-by-place": Killer(CALLS.format("groups-in-another-order"), "[[10.0"),
    "numbers-in-the-order-of-groups": Killer(CALLS.format("numbers-in-another-order"), "[[20.0"),
    "whole-divided-twice": Killer("test_averages_in_two_dtypes and w4-half-replicas-alone", "15 / 4"),
}

cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
