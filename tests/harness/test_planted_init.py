"""Bugs of refusals, values, ranks, placements, extensions and wrapping policies each fail a case that names them."""

from __future__ import annotations

import pytest

from tests.harness import planted_init as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers, few_by_day

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

UNFIT, TWO_UNITS = "test_what_cannot_be_sharded and w2-{}", "test_parameter_of_two_units and w2-originals-{}"
ORDER, ORDERS = "test_part_of_the_world_in_another_order and w4-None-{}", "test_replicas_in_different_orders and w4"
REPLICAS_ORDER = "test_replicas_in_another_order and w4-True"
MADE, SENT = "test_values_made_on_the_meta_device and w2-{}", "test_values_of_the_first_rank and w{}"
NUMBERS = "test_other_numbers_of_ranks and w3-None"
SIZE, CHOICE, IGNORED = "test_by_size and w2-{}]", "test_by_choice and w2-{}]", "test_beside_ignored_modules and w2-{}]"
NORM = "test_batch_norm_in_full_precision"
NO_NAME, OTHER_VALUES = "the error names none of", "other values than those that the model's modules make"
GRADIENT, OUTPUT = "gradient of '", "output of 'microbatch 0, tensor 0' in the first step"
KILLED = {
    "scalars-taken": Killer(UNFIT.format("a-scalar"), NO_NAME),
    "changed-before-the-check": Killer(UNFIT.format("a-scalar"), "a refusal changed the values of"),
    "three-dimensions-taken": Killer(UNFIT.format("three-dimensions"), "no rank refuses it"),
    "sizes-that-do-not-divide-taken": Killer(UNFIT.format("a-size-that-does"), NO_NAME),
    "two-dtypes-taken": Killer(UNFIT.format("two-dtypes and not in-a-unit"), ""),
    "root-before-the-checks": Killer(
        "test_model_that_is_repaired_after_a_refusal and w2-two-dtypes and not in-a-unit",
        "the sharded run has no gradient",
    ),
    "uneven-dimensions-taken": Killer(UNFIT.format("an-uneven"), ""),
    "shared-by-two-units-taken": Killer(TWO_UNITS.format("two-units"), "the model is not sharded"),
    "rank-of-the-world": Killer(ORDER.format("False"), "the sharded run diverges from the baseline"),
    "orders-not-compared": Killer(ORDERS, GRADIENT),
    "new-values-not-noticed": Killer(MADE.format("reset-whole-model"), ""),
    "three-ranks-not-padded": Killer(NUMBERS, ""),
    "experts-averaged-over-their-own": Killer("test_experts and w4-ragged-None", GRADIENT + "experts."),
    "other-dimension-as-the-first": Killer("test_other_dimensions and w2-largest-None", OUTPUT),
    "cut-in-the-order-of-the-mesh": Killer("test_other_dimensions_beside and same", "the shards of"),
    "shard-before-replicas": Killer("test_layout and w2-False-True", "is placed"),
    "one-hook-taken": Killer("test_one_hook_alone", "refused after these collectives"),
    "extended-never-freed": Killer("test_what_a_hook_makes_is_freed and object", "hold bytes"),
    "extended-not-filled-again": Killer("test_what_a_hook_makes_is_freed and object", ""),
    "flat-two-dtypes-taken": Killer(UNFIT.format("two-dtypes and not in-a-unit"), ""),
    "flat-three-dimensions-taken": Killer(UNFIT.format("cube-of-replicas"), "no rank refuses it"),
    "flat-group-of-all": Killer(ORDER.format("True"), ""),
    "flat-groups-swapped": Killer(REPLICAS_ORDER, ""),
    "flat-orders-not-compared": Killer(ORDERS, GRADIENT),
    "flat-nothing-reset": Killer(MADE.format("reset-whole-model"), OTHER_VALUES),
    "flat-function-for-the-unit-alone": Killer(MADE.format("function-whole-model"), ""),
    "flat-first-rank-of-each-replica": Killer(SENT.format("2-replicas"), OTHER_VALUES),
    "flat-buffers-not-sent": Killer(SENT.format("2-shards"), OTHER_VALUES),
    "flat-third-rank-misplaced": Killer(NUMBERS, ""),
    "flat-inner-units-counted": Killer(SIZE.format("42"), ""),
    "flat-leaves-wrapped": Killer(SIZE.format("42"), ""),
    "flat-last-child-alone-counted": Killer(SIZE.format("42"), ""),
    "flat-ignored-counted": Killer(IGNORED.format("too-small"), ""),
    "flat-ignored-looked-into": Killer(IGNORED.format("classes"), "in the place of blocks.0 is a"),
    "flat-ignored-chosen": Killer(IGNORED.format("objects"), "in the place of blocks.0 is a"),
    "flat-options-forgotten": Killer(CHOICE.format("custom"), "all_gather instead of"),
    "flat-chosen-classes-alone-looked-into": Killer(CHOICE.format("classes"), ""),
    "flat-batch-norm-in-low-precision": Killer(NORM, ""),
    "flat-batch-norm-returns-its-own": Killer(NORM, "dtype"),
}


cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
