"""Bugs where no case had looked before each fail the case that was written for them, in one run."""

from __future__ import annotations

import pytest

from tests.harness import planted_corners as planted
from tests.harness.planted import Killer, a_third_by_day, assert_killed, assert_sound_passes, cases_of_killers

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

LENT, CLASSES = "test_containers_that_a_script_passes and w2-{}", "test_classes_of_containers and w2-{}"
DIMENSIONS, WRONG = "test_named_dimensions and {}-equal", "test_wrong_dimensions and {}"
NOT_REFUSED = "no rank refuses it"
WHOLE = "test_whole_parameters_that_cannot_be and w2-{}"
KILLED = {
    "dict-of-a-script-changed": Killer(LENT.format("dict"), "a unit has replaced tensors"),
    "list-of-a-script-changed": Killer(LENT.format("list"), "a unit has replaced tensors"),
    "dataclass-of-a-script-changed": Killer(LENT.format("dataclass"), "a unit has replaced tensors"),
    "class-of-dicts-lost": Killer(CLASSES.format("ordered-dict"), "expected OrderedDict between units, got dict"),
    "class-of-lists-lost": Killer(CLASSES.format("list-class"), "expected OwnList between units, got list"),
    "class-of-tuples-lost": Killer(CLASSES.format("tuple-class"), "expected OwnTuple between units, got tuple"),
    "frozen-fields-set": Killer(CLASSES.format("frozen-dataclass"), "cannot assign to field"),
    "keys-left-behind": Killer(CLASSES.format("dict-dataclass"), "the key x and the attribute x"),
    "names-of-dimensions-ignored": Killer(DIMENSIONS.format("shard-tp"), ""),
    "shards-over-named-replicas": Killer(DIMENSIONS.format("replicate-shard"), ""),
    "named-replicas-sharded": Killer(DIMENSIONS.format("replicate-tp"), ""),
    "names-by-letters": Killer(DIMENSIONS.format("shard-tp"), "name 'd' not found"),
    "shards-over-the-first-dimension": Killer(DIMENSIONS.format("tp-shard"), ""),
    "strided-by-earlier-dimensions": Killer(DIMENSIONS.format("tp-shard"), "is placed"),
    "cut-again": Killer(WRONG.format("cut-already"), NOT_REFUSED),
    "named-replicas-in-any-order": Killer("test_named_replicas_in_different_orders", "gradient of"),
    "no-dimension-named": Killer(WRONG.format("no-name"), "the error names none of"),
    "one-tensor-by-rows": Killer("test_some_parameters and one-lists", ""),
    "first-one-scaled": Killer("test_some_parameters and some-one-by-one", "clipped gradient of"),
    "flat-first-applied-is-the-root": Killer("test_function_for_every_module and w2-shards-originals", ""),
    "flat-buffers-of-wrappers": Killer("test_whole_parameters and w2-None-read-originals", ""),
    "flat-whole-is-thawed": Killer("test_whole_frozen_parameters and w2-flat", "requires_grad of whole parameters"),
    "flat-first-rank-keeps-changes": Killer(WHOLE.format("changes"), "are not refused"),
    "flat-whole-in-a-forward": Killer(WHOLE.format("in-a-forward"), ""),
}

cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", a_third_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
