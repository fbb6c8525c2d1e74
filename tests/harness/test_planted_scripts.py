"""Bugs in what optimizers, scalers, generators, buffers and dtypes depend on each fail a case that names them."""

from __future__ import annotations

import pytest

from tests.harness import planted_scripts as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers, few_by_day

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

#: The memory of a gradient that somebody else made ends before that of what a reduction made.
BEYOND = "out of bounds for storage"
GRADIENT, OUTPUT, EVALUATION = "gradient of '", "output of 'microbatch 0", "output of 'evaluation, tensor 0'"
TEN_STEPS = "test_ten_steps and momentum-foreach-7-original"
AVERAGES = "test_averages_of_weights and w2-{}-exponential-original"
CHANGES = "test_gradients_that_a_script_changes and w2-{}-zeros-original"
INFINITE = "test_infinite_gradients and w2-float32-False-False"
MASKS = "test_masks_of_dropout and w2-{}-None"
STATISTICS = "test_running_statistics and w2-None-moving"
FRESH = "test_fresh_memory_is_not_read and w2-None"
GENERATOR = "the generator of the CPU has another state than the baseline's"
KILLED = {
    "zeros-not-added-to": Killer("test_gradients_that_a_script_changes and w2-replace-zeros-original", GRADIENT),
    "buffer-added-to-by-half": Killer(TEN_STEPS, f"{GRADIENT}gain' in the third step"),
    "thawed-not-reduced": Killer("test_groups_and_schedules and original", "only the baseline has one"),
    "writes-not-noticed": Killer(AVERAGES.format("None"), OUTPUT),
    "local-writes-not-noticed": Killer("test_averages_of_weights and w2-None-equal-original", OUTPUT),
    "fused-steps-not-noticed": Killer("test_steps_after_an_evaluation and w2-alone-fused-original", OUTPUT),
    "gradients-placed-as-replicas": Killer("test_updates_of_whole_matrices and w2", ""),
    "replaced-gradients-not-noticed": Killer(CHANGES.format("replace"), BEYOND),
    "infinities-removed": Killer(INFINITE, GRADIENT),
    "infinities-removed-on-the-way-home": Killer("test_gradients_on_the_cpu and w2-False-pageable", GRADIENT),
    "a-number-for-each-gather": Killer(MASKS.format("None"), OUTPUT),
    "a-number-for-each-recomputation": Killer(MASKS.format("call"), GRADIENT),
    "a-number-for-each-shard": Killer(MASKS.format("None"), OUTPUT),
    "buffers-of-the-first-rank": Killer(STATISTICS, "running_mean': element, buffer and the baseline's"),
    "replicas-round-apart": Killer("test_determinism and test_replicas and 2x2", "which holds the same share"),
    "later-runs-round-apart": Killer("test_two_runs and w2-None", "two runs that should be equal differ"),
    "reduced-in-the-dtype-of-autocast": Killer("test_autocast and w2-None", GRADIENT),
    "evaluation-not-cast": Killer("test_precision and test_evaluation and w2-bf16", EVALUATION),
    "tensor-parallel-not-cast": Killer("test_precision and test_tensor_parallel_shards and w4-bf16]", OUTPUT),
    "replicas-in-full-precision": Killer("test_precision and test_replicas and fp32-bf16", "should be of bfloat16"),
    "partial-sums-in-the-dtype-of-compute": Killer("test_deferred_all_reduces and bf16-fp32", GRADIENT),
    "reduce-dtype-of-the-first-unit": Killer("test_policies_of_units and w2-bf16-fp32-fp32-bf16-fp16-fp32", GRADIENT),
    "shards-rounded-by-the-gather": Killer("test_small_updates and w2", "parameter after step of '"),
    "nan-removed": Killer("test_nan_stays_in_its_element and w2-nan", "not finite are 0 elements"),
    "reduction-adds-to-its-output": Killer(FRESH, "sharded nan"),
    "flat-zeros-added-to-by-half": Killer(TEN_STEPS, f"{GRADIENT}gain' in the third step"),
    "flat-thawed-only-at-first": Killer("test_groups_and_schedules and original", GRADIENT),
    "flat-writes-not-noticed": Killer(AVERAGES.format("None"), OUTPUT),
    "flat-writes-to-originals-not-noticed": Killer(AVERAGES.format("None"), OUTPUT),
    "flat-fused-steps-not-noticed": Killer("test_steps_after_an_evaluation and w2-alone-fused-original", OUTPUT),
    "flat-replaced-gradients-not-noticed": Killer(CHANGES.format("replace"), BEYOND),
    "flat-replaced-data-not-noticed": Killer(CHANGES.format("replace-data"), BEYOND),
    "flat-infinities-removed": Killer(INFINITE, GRADIENT),
    "flat-a-number-for-each-gather": Killer(MASKS.format("None"), OUTPUT),
    "flat-a-number-for-each-recomputation": Killer(MASKS.format("call"), GRADIENT),
    "flat-buffers-of-the-first-rank": Killer(STATISTICS, "running_mean': element, buffer and the baseline's"),
    "flat-replicas-round-apart": Killer("test_determinism and test_replicas and 2x2", "which holds the same share"),
    "flat-reduced-in-the-dtype-of-autocast": Killer("test_autocast and w2-None", GRADIENT),
    "flat-evaluation-not-cast": Killer("test_precision and test_evaluation and w2-bf16", EVALUATION),
    "flat-evaluation-gathers-low": Killer("test_evaluation_in_full_precision and w2-None", EVALUATION),
    "flat-training-after-evaluation-stays-full": Killer("test_evaluation_in_full_precision and w2-None", OUTPUT),
    "flat-low-gradients-widened": Killer(
        "test_gradients_that_stay_low and w2-stays-bf16-original", "has dtype torch.float32"
    ),
    "flat-tensor-parallel-not-cast": Killer("test_precision and test_tensor_parallel_shards and w4-bf16]", OUTPUT),
    "flat-flag-of-the-root-in-every-unit": Killer("test_inputs and w2-position-False", OUTPUT),
    "flat-flag-of-the-root-ignored": Killer("test_policies_of_units and w2-bf16-fp32-fp32-bf16-fp16-fp32", OUTPUT),
    "flat-replicas-in-full-precision": Killer(
        "test_precision and test_replicas and fp32-bf16", "should be of bfloat16"
    ),
    "flat-reduce-dtype-of-the-first-unit": Killer(
        "test_policies_of_units and w2-bf16-fp32-fp32-bf16-fp16-fp32", GRADIENT
    ),
    "flat-shards-rounded-by-the-gather": Killer("test_small_updates and w2", "parameter after step of '"),
    "flat-nan-removed": Killer("test_nan_stays_in_its_element and w2-nan", "not finite are 0 elements"),
    "flat-reduction-adds-to-its-output": Killer(FRESH, "sharded nan"),
}


cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
