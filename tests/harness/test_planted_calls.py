"""Bugs in what a wrapper answers, and in what an error leaves, each fail the case that was written for them."""

from __future__ import annotations

import pytest

from tests.harness import planted_calls as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers, few_by_day

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

REPLICAS = "test_answers_of_replicas"
COMBINED, TOLD = "test_what_cannot_be_combined and w2-{}", "test_warnings and w2-{}"
NOT_REFUSED, INSTEAD = "no rank refuses it", " instead of "
KILLED = {
    "infinite-in-float64": Killer("test_norm_that_is_not_finite and w2-float64-inf-inf", "raises"),
    "flat-numbers-of-items-alone": Killer("test_answers and w2-items", "int()"),
    "flat-form-that-was-set": Killer("test_answers and w2-forms", INSTEAD),
    "flat-loaded-is-nothing": Killer("test_answers and w2-loaded-directly", INSTEAD),
    "flat-group-ignored": Killer(REPLICAS, "the first rank of all"),
    "flat-parameters-ignored": Killer("test_answers and w2-states-by-parameters", INSTEAD),
    "flat-own-states-alone": Killer("test_answers and w2-states-of-a-script", INSTEAD),
    "flat-groups-needed": Killer("test_answers and w2-states-without-groups", "param_groups"),
    "flat-states-saved-as-parameters": Killer("test_answers and w2-states-in-another-dtype", INSTEAD),
    "flat-states-joined-as-parameters": Killer("test_answers and w2-flat-states-in-another-dtype", INSTEAD),
    "flat-mesh-forgotten": Killer("test_answers and w2-mesh-of-shards", INSTEAD),
    "flat-mesh-of-replicas-forgotten": Killer(REPLICAS, "do not lie on the mesh"),
    "flat-root-has-one-setting": Killer("test_answers and w2-casts-of-the-root", INSTEAD),
    "flat-norm-by-keyword-stays-low": Killer("test_answers and w2-dtypes-of-a-norm", INSTEAD),
    "flat-version-of-the-wrapper": Killer("test_answers and w2-version-of", INSTEAD),
    "flat-parts-from-the-beginning": Killer("test_answers and w2-a-transposed-part", INSTEAD),
    "flat-gaps-kept": Killer("test_answers and w2-every-other-column", ""),
    "flat-replicas-on-the-cpu": Killer(COMBINED.format("replicas-whole-on-the-cpu"), NOT_REFUSED),
    "flat-roots-under-a-root": Killer(COMBINED.format("a-layer-before-the-model"), NOT_REFUSED),
    "flat-made-of-anything": Killer(COMBINED.format("values-by-no-reset"), NOT_REFUSED),
    "flat-dicts-unmentioned": Killer(TOLD.format("a-dict"), "no UserWarning"),
    "flat-replicas-unmentioned": Killer(TOLD.format("nothing-sharded"), "no FutureWarning"),
    "flat-one-rank-unmentioned": Killer("test_warning_of_one_rank", "no UserWarning"),
    "flat-ignored-root-unmentioned": Killer(TOLD.format("ignored-whole"), "no UserWarning"),
    "flat-norms-unmentioned": Killer(TOLD.format("a-norm-by-a-rule"), "no UserWarning"),
    "flat-frozen-unmentioned": Killer(TOLD.format("frozen-in-a-unit"), "no UserWarning"),
    "flat-frozen-counted-twice": Killer(TOLD.format("frozen-apart"), "a UserWarning"),
    "flat-copies-unmentioned": Killer(TOLD.format("whole-on-every-cpu"), "no UserWarning"),
    "flat-older-argument-unmentioned": Killer(TOLD.format("older-parameters"), "no FutureWarning"),
    "flat-whole-ones-are-others": Killer(
        "test_whole_parameters_are_the_models_own and w2-False-shards", "other objects"
    ),
    "flat-written-onto-themselves": Killer("test_whole_parameters_before_backward and w2-True-None-replicas", ""),
    "flat-no-attributes-afterwards": Killer("test_attributes_after and w2-shards-flat", "has no attribute 'weight'"),
    "flat-gradients-in-another-order": Killer("test_whole_gradients_of_columns and replicas-alone", "than was written"),
    "flat-whole-after-an-error": Killer("test_exception_where_parameters and w2-shards-originals", ""),
    "flat-exposed-after-an-error": Killer("test_cast_that_raises and w2-False", "after the failed cast"),
    "flat-interrupts-unseen": Killer("test_interrupt and w2-forward", ""),
    "flat-in-forward-after-an-error": Killer("test_saving_after and w2-forward", "Cannot manually unshard"),
    "flat-in-backward-after-an-error": Killer("test_saving_after and w2-backward", "Cannot manually unshard"),
    "flat-any-unit-frees-all": Killer("test_exception_that_the_model_catches and w2-None", ""),
}

cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
