"""Bugs that had lived each fail the case that was written for them, in one run."""

from __future__ import annotations

import pytest

from tests.harness import planted_survivors as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers, few_by_day

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

SUM, SUM_OF_REPLICAS = "test_sums_beyond and w2", "test_sums_of_replicas and 4x1"
BOTH_DTYPES = "test_gradients_of_two_dtypes and {}"
SECOND = "test_second_evaluation and w2-{}"
DROPS = "test_gradients_that_a_script_drops and {}"
GRADIENT, AVERAGE = "gradient of '", "element, gradient and average of the ranks"
CLIPPED, NORM = "clipped gradient of '", "total norm: "
EVALUATED = "output of 'evaluation"
DROPPED = "element, found and expected"
KILLED = {
    "replicas-not-divided": Killer(SUM_OF_REPLICAS, AVERAGE),
    "divided-by-the-root-of-shards": Killer(SUM_OF_REPLICAS, AVERAGE),
    "divided-before": Killer("test_sums_beyond and w4", AVERAGE),
    "divided-after": Killer(SUM, AVERAGE),
    "not-divided-before": Killer(SUM, AVERAGE),
    "not-divided-after": Killer("test_sums_of_replicas and 2x2", AVERAGE),
    "divided-again-by-replicas": Killer(SUM_OF_REPLICAS, AVERAGE),
    "half-range-is-wide": Killer(SUM, AVERAGE),
    "norms-in-half": Killer(BOTH_DTYPES.format("float16-32-1.0"), NORM + "inf"),
    "shares-in-float32": Killer(BOTH_DTYPES.format("float32-64-2.0"), NORM),
    "norm-in-the-first-dtype": Killer(BOTH_DTYPES.format("float16-2.0"), CLIPPED),
    "one-dtype-scaled": Killer(BOTH_DTYPES.format("float16-32-2.0"), CLIPPED),
    "kinds-by-device": Killer(BOTH_DTYPES.format("float16-32-2.0"), CLIPPED),
    "shares-overwritten": Killer(BOTH_DTYPES.format("float16-32-2.0"), NORM),
    "stale-values-kept": Killer(SECOND.format("None"), EVALUATED),
    "stale-smaller-shards-kept": Killer("test_second_evaluation and w4-2", EVALUATED),
    "steps-not-counted": Killer(SECOND.format("None"), EVALUATED),
    "gather-in-flight-kept": Killer("test_gathers_in_flight_do_not and w2-None", ""),
    "cast-while-gathered": Killer("test_cast_after_an_evaluation and w2-False", ""),
    "second-name-keeps-the-original": Killer("test_tied_inside and w2-of-one-module-None", ""),
    "named-after-the-checks": Killer("test_forward_on_the_meta_device and whole-model", "the error names none of"),
    "state-dicts-of-units-alone": Killer(
        "test_of_a_module_inside and w2-False-copied", "has unsharded values of weight"
    ),
    "held-past-the-module": Killer("test_recurrent_module and w2-None-originals", ""),
    "call-does-not-wait": Killer("test_a_call_shows and w2-None", "are not gathered: out.weight"),
    "handle-does-not-wait": Killer("test_a_call_shows and w2-None", "are not gathered: layers"),
    "default-mesh-of-one": Killer("test_all_ranks_by_default and w2", ""),
    "norm-of-nothing": Killer("test_without_any_gradient and w2-2.0", ""),
    "frozen-reduced-as-zeros": Killer("test_zeros_are_reduced_or_not and the-unit", "skipped.bias"),
    "unit-waits-for-all-again": Killer("test_unit_of_several_modules_is and w2-None", "when layers.2 computes"),
    "one-rank-is-no-whole": Killer("test_after_forward and w2-8-1-three-units", "gathered is False after forward"),
    "integers-cast": Killer("test_frozen_integers and not beside", ""),
    "output-of-a-method-as-it-is": Killer("test_casts_of_a_registered_method", ""),
    "pending-sums-in-the-dtype-of-compute": Killer("test_sums_over_tensor_parallel_ranks", "is not 257"),
    "method-runs-sharded": Killer("test_forward_method_of_one_module", ""),
    "negative-size-taken": Killer("test_what_cannot_be_sharded and a-negative-size", "the error names none of"),
    "two-dtypes-packed": Killer("test_parameters_of_one_microbatch", ""),
    "extensions-in-the-dtype-of-shards": Killer("test_tensors_in_a_dtype_of_compute", ""),
    "zeros-in-the-dtype-of-shards": Killer("test_parameters_of_one_rank", ""),
    "cast-loses-unreduced-gradients": Killer("test_cast_between_microbatches and originals", "gradient of 'layers.0"),
    "factor-of-three": Killer("test_divide_factors and w2-shards-of-three-float16", ""),
    "infinite-norm-accepted": Killer("test_norm_that_is_not_finite_raises and float32-inf-2.0", "raises ['', '']"),
    "failed-forward-counts": Killer("test_first_forward_that_raises and w2-input-original", "warned although"),
    "ranks-of-the-group": Killer("test_ranks_of_a_part and w4-original", "ranks 2 and 3 differ"),
    "root-ungathers-all": Killer("test_backward_gathers_a_unit_or_not and w2-the-root", ""),
    "sync-leaves-all-reduce": Killer("test_deferred_all_reduce_is_taken_back", GRADIENT),
    "first-place-of-two": Killer("test_backward_gathers_one_unit_ahead and twice", "gathered are"),
    "one-unit-skipped": Killer("test_backward_gathers_one_unit_ahead and once", "gathered are"),
    "prefetched-in-vain": Killer("test_backward_gathers_no_unit_in_vain", "'layers.1'"),
    "narrow-first": Killer("test_frozen_of_another_dtype and w2-None", "Byte as Float"),
    "elements-for-bytes": Killer("test_frozen_of_another_dtype and w2-None", "Byte as Float"),
    "late-fields-not-seen": Killer("test_loss_of_any_one_output and w2-late-dataclass", ""),
    "nan-left-out-of-the-norm": Killer("test_norm_of_nan and w2-inf", "with a NaN in row"),
    "flat-replicas-not-divided": Killer(SUM_OF_REPLICAS, AVERAGE),
    "flat-not-divided-before": Killer(SUM, AVERAGE),
    "flat-not-divided-after": Killer("test_sums_of_replicas and 2x2", AVERAGE),
    "flat-stale-values-kept": Killer(SECOND.format("None"), EVALUATED),
    "flat-one-unit-skipped": Killer("test_backward_gathers_one_unit_ahead and once", "gathered are"),
    "flat-prefetched-in-vain": Killer("test_backward_gathers_no_unit_in_vain", "'layers.1'"),
    "flat-unsharded-shown-after-forward": Killer(DROPS.format("all-before-backward"), DROPPED),
    "flat-kept-shown-after-backward": Killer(DROPS.format("all-kept"), DROPPED),
    "flat-unreduced-not-shown": Killer(DROPS.format("all-kept"), DROPPED),
    "flat-dropped-comes-back": Killer(DROPS.format("all-kept"), DROPPED),
    "flat-one-dropped-is-kept": Killer(DROPS.format("one-before-forward"), DROPPED),
    "flat-inner-context-ends-all": Killer("test_contexts_nest", "reduce_scatter instead of 4"),
    "flat-new-data-lost": Killer("test_parameters_that_a_script_changes and w2-data", ""),
    "flat-wrapping-goes-on": Killer("test_by_hand_after_an_error", "already within an autowrap context"),
    "flat-overrides-lost": Killer("test_by_choice and w2-by-hand", "all_gather"),
    "flat-norm-in-float32": Killer(BOTH_DTYPES.format("float32-64-2.0"), NORM),
}


cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
