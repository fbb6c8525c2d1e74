"""Bugs of one edited place in reductions, accumulation, clipping and resharding each fail a case that names them."""

from __future__ import annotations

import pytest

from tests.harness import planted_reductions as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers, few_by_day

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")


ADD_UP = "test_microbatches_add_up and shards-{}"
ADD_UP_REPLICAS = "test_microbatches_add_up and replicas-{}"
ONE_UNIT, OWN_UNITS = "test_part_used and one-unit-{0}]", "test_part_used and own-units-{0}]"
NORM = "test_small_and_large and w2-{}"
REPLACED = "test_gradients_that_a_script_replaced"
GRADIENT = "gradient of '"
CLIPPED = "clipped gradient of '"
NORM_WRONG = "total norm"
KILLED = {
    "partial-shards-dropped": Killer(OWN_UNITS.format("replicas-deferred-all-reduce"), GRADIENT),
    "other-partial-dropped": Killer(ONE_UNIT.format("replicas-deferred-all-reduce"), GRADIENT),
    "partial-never-completed": Killer(OWN_UNITS.format("replicas-deferred-all-reduce"), GRADIENT),
    "partial-kept": Killer(OWN_UNITS.format("replicas-deferred-all-reduce"), GRADIENT),
    "all-reduce-sums": Killer(ADD_UP_REPLICAS.format("default"), GRADIENT),
    "all-reduce-over-shards": Killer("test_hybrid and test_counts and None-2x2", GRADIENT),
    "all-reduce-skipped-for-one-shard": Killer("test_one_replica_and_one_shard and 4x1", GRADIENT),
    "all-reduce-of-a-copy-in-double": Killer("test_hybrid and test_counts and None-2x2", "float32"),
    "stray-all-reduce-over-the-world": Killer("test_only_ranks_of_the_mesh and rows", "data-parallel ranks are"),
    "unit-without-backward-not-reduced": Killer(OWN_UNITS.format("deferred"), GRADIENT),
    "existing-gradients-dropped": Killer(ONE_UNIT.format("default"), GRADIENT),
    "current-without-the-same-parameters": Killer(ONE_UNIT.format("default"), ""),
    "buffer-replaced": Killer(ADD_UP.format("default"), GRADIENT),
    "replaced-gradient-is-current": Killer(REPLACED, "out of bounds for storage"),
    "gradient-not-taken": Killer(ADD_UP.format("default"), GRADIENT),
    "unreduced-dropped": Killer(ADD_UP.format("first-and-last"), GRADIENT),
    "root-only-recurses": Killer("test_reduction_waits and w2-root-only-True-None", "instead of 10 in backward"),
    "all-reduce-flag-stops-all": Killer("test_hybrid_reduction_waits and all-reduce-all-True-None", "reduce_scatter"),
    "kept-after-backward-ignored": Killer("test_parameters_stay_gathered and w4-all", "all_gather instead of 4"),
    "last-backward-ignored": Killer("test_backwards_before and w2-2", "backward 1 does not follow the order"),
    "indices-forgotten-early": Killer("test_backwards_before and w2-2", "backward 1 does not follow the order"),
    "backward-gathers-world": Killer("test_counts_and_bytes and w4-2", "its ranks should be (0, 1)"),
    "kept-after-backward": Killer("test_after_backward and w2-False-three", "after the backward of the first step"),
    "smaller-shards-reversed": Killer("test_after_forward and w4-8-2-three", "element, shown and original"),
    "strided-groups": Killer("test_counts_and_bytes and w4-2", "its ranks should be (0, 1)"),
    "root-frees-by-default": Killer("test_counts_and_bytes and w4-None", "4 all_gather instead of 3 in backward"),
    "kept-without-autograd": Killer("test_after_forward_without_gradients and w2-True", "gathered is True after"),
    "skipped-member-never-completes": Killer("test_unit_with_modules and w2-0", ""),
    "gathered-for-each-module": Killer("test_collectives and test_unit_of_several", ""),
    "frozen-thawed": Killer("test_attributes_of and w2-None", "before forward layers.1.in_proj.weight has"),
    "smaller-shards-thawed": Killer("test_attributes_of and w4-2", "layers.1.in_proj.weight has"),
    "norm-counts-replicas": Killer("test_clipping and test_replicas and w4-2.0", ""),
    "gradients-scaled-up": Killer("test_norm_below and w2-2.0", CLIPPED),
    "large-epsilon": Killer(NORM.format("1e-06-2.0"), CLIPPED),
    "powers-not-taken": Killer(NORM.format("1e-06-2.0"), NORM_WRONG),
    "always-a-square-root": Killer(NORM.format("1.0-3.0"), NORM_WRONG),
    "inf-norm-summed-over-ranks": Killer("test_norm_costs and w2-inf", NORM_WRONG),
    "inf-norm-summed-over-shares": Killer("test_clipping and test_two_dimensions and originals-16-inf", NORM_WRONG),
    "norm-of-empty-shards": Killer("test_empty_shards and w4-inf", ""),
    "empty-rank-leaves-the-norm": Killer("test_empty_shards and w4-2.0", ""),
    "flat-buffer-replaced": Killer(ADD_UP.format("every-backward"), GRADIENT),
    "flat-existing-replaced": Killer(REPLACED, GRADIENT),
    "flat-aside-lost": Killer(ADD_UP.format("first-and-last"), GRADIENT),
    "flat-gradient-not-taken": Killer(ADD_UP.format("every-backward"), "The size of tensor a"),
    "flat-unit-without-backward-not-reduced": Killer(OWN_UNITS.format("deferred"), "The size of tensor a"),
    "flat-always-frees": Killer("test_parameters_stay_gathered and w4-all", "all_gather instead of 4"),
    "flat-no-sync-of-the-root": Killer("test_root_keeps and w2", "reduce_scatter instead of 4"),
    "flat-no-sync-for-good": Killer("test_root_keeps and w2", ""),
    "flat-all-reduce-over-shards": Killer("test_hybrid and test_counts and None-2x2", GRADIENT),
    "flat-empty-rank-leaves-the-norm": Killer("test_ranks_without_any", ""),
    "flat-frozen-gets-gradients": Killer("test_frozen_and_unused and w2-2.0", GRADIENT),
    "flat-groups-swapped": Killer("test_hybrid and test_counts and None-2x2", "the local shard has shape"),
    "flat-norm-of-one-unit": Killer("test_norm_costs and w2-2.0", NORM_WRONG),
    "flat-root-frees": Killer("test_counts_and_bytes and w4-None", "4 all_gather instead of 3 in backward"),
    "split-units": Killer("test_collectives and test_unit_of_several", "4 all_gather instead of 3 in forward"),
    "ignored-offload": Killer("test_memory_that_cannot_be_pinned and w2", "DID NOT RAISE"),
}


cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
