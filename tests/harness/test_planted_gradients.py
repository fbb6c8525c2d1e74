"""Bugs of the flat reference about whose gradients, states and names are whose each fail the case written for them."""

from __future__ import annotations

import pytest

from tests.harness import planted_gradients as planted
from tests.harness.planted import (
    Killer,
    assert_killed,
    assert_sound_passes,
    cases_of_killers,
    few_by_day,
)

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

CALLS = "test_answers and w2-{}"
REPLACED = "test_gradients_of_parameters_that_a_script_replaced and {}"
DROPPED = "test_gradients_that_a_script_drops and {}"
STRIDES = "test_other_strides and replicas-alone-full"
PART = "test_states_of_a_part_of_the_ranks"
KILLED = {
    "flat-gradients-of-the-replaced": Killer(REPLACED.format("own-False"), "has no gradient"),
    "flat-others-in-the-same-memory-not-taken": Killer(REPLACED.format("same-False"), "has no gradient"),
    "flat-others-in-the-same-memory-not-noticed": Killer(REPLACED.format("same-True"), "has no gradient"),
    "flat-frozen-gathered-once": Killer("test_frozen_unit_that_runs_twice and None", "storage of size 0"),
    "flat-frozen-freed-by-position": Killer("test_frozen_units_with_keywords_are_freed", "is still gathered"),
    "flat-unreduced-cast-as-shards": Killer("test_gradients_that_a_script_zeroes_after and False", "gradient of"),
    "flat-unreduced-hidden-by-a-look": Killer(DROPPED.format("all-after-a-look"), "gradient of"),
    "flat-unreduced-hidden-by-an-error": Killer(DROPPED.format("all-after-a-failed-look"), "gradient of"),
    "flat-whole-after-a-refusal": Killer("test_whole_parameters_that_were and shards-flat", "after the refusal"),
    "flat-functions-refused-after-an-error": Killer("test_function_for_every_module_after and backward", "to be in"),
    "flat-states-by-rows": Killer(STRIDES, ""),
    "flat-states-loaded-by-rows": Killer(STRIDES, ""),
    "flat-states-of-the-first-of-all": Killer(PART, ""),
    "flat-states-sent-by-the-first-of-all": Killer(PART, ""),
    "flat-bare-root-saves-everywhere": Killer(CALLS.format("first-rank-of-a-bare-root"), "False instead of True"),
    "flat-bare-root-casts-nothing": Killer(CALLS.format("casts-of-a-bare-root"), ""),
    "flat-norm-with-options-of-the-model": Killer(CALLS.format("norm-with-options"), "instead of"),
    "flat-cast-moves-names": Killer(CALLS.format("places-after-a-cast"), "instead of"),
    "flat-buffers-by-checkpointing-names": Killer(CALLS.format("buffers-of-what-is-recomputed"), "instead of"),
    "flat-bare-root-is-not-summoned": Killer(CALLS.format("names-of-a-bare-root"), "instead of"),
    "flat-states-of-those-that-have-some": Killer(CALLS.format("states-of-a-small-unit"), ""),
    "flat-function-gets-what-was-computed": Killer(CALLS.format("dtype-for-a-function"), "instead of"),
    "flat-refused-once": Killer(CALLS.format("refused-again"), "instead of"),
    "flat-elements-left-twice": Killer(CALLS.format("nested-by-size"), "instead of"),
    "flat-elements-of-the-first-place-alone": Killer(CALLS.format("in-two-places-by-size"), "instead of"),
    "flat-unreduced-of-the-freed-kept": Killer(
        "test_exception_in_a_later_microbatch and last-backward-1-reduction", "diverges"
    ),
    "flat-views-without-gradients": Killer("test_recomputed_spans and part-of-a-layer-reentrant", ""),
    "flat-replicas-kept-while-waiting": Killer("test_gathers_while_reductions_wait", "all_gather"),
    "flat-options-of-the-optimizer": Killer(CALLS.format("options-of-a-script"), "instead of"),
    "flat-local-states-with-originals": Killer(CALLS.format("names-of-local-states"), "instead of"),
    "flat-whole-cut-ones-thawed": Killer("test_whole_frozen_parameters_beside", "are frozen: []"),
    "flat-second-place-stays-whole": Killer(CALLS.format("tied-after-whole-ones"), "instead of"),
}

cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
