"""Bugs of casts, of the dtypes of sums, of divisions and of ignored parameters each fail a case that names them."""

from __future__ import annotations

import pytest

from tests.harness import planted_precision as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers, few_by_day

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

TRAINING = "test_precision and test_training and w2-{}-None"
RECOMPUTED = "test_precision and test_recomputation and w2-bf16]"
FACTORS = "test_divide_factors and w2-shards-of-all-units-{}"
OUTPUT, GRADIENT = "output of 'microbatch 0, tensor 0' in the first step", "gradient of '"
KILLED = {
    "inputs-cast-unasked": Killer(TRAINING.format("inputs-as-they-are"), OUTPUT),
    "keywords-not-cast": Killer("test_inputs and keyword-True", OUTPUT),
    "recomputed-inputs-not-cast": Killer(RECOMPUTED, "CheckpointError"),
    "outputs-not-cast": Killer("test_outputs and w2-False", OUTPUT),
    "lists-not-seen": Killer("test_inputs and list-True", OUTPUT),
    "reduced-in-the-dtype-of-compute": Killer(TRAINING.format("bf16-fp32"), GRADIENT),
    "unnamed-reduced-in-the-dtype-of-compute": Killer(TRAINING.format("bf16"), GRADIENT),
    "sums-in-the-dtype-of-compute": Killer("test_microbatches and w2-True-bf16-fp32", GRADIENT),
    "unnamed-sums-in-the-dtype-of-compute": Killer("test_microbatches and w2-True-bf16]", GRADIENT),
    "microbatches-rounded-before-the-sum": Killer("test_microbatches and w2-True-fp32-bf16", GRADIENT),
    "gradients-in-the-dtype-of-compute": Killer("test_small_updates and w2", GRADIENT),
    "last-microbatch-not-added": Killer("test_microbatches and w2-True-bf16-fp32", GRADIENT),
    "factor-forgotten": Killer(FACTORS.format("float32"), GRADIENT),
    "factor-is-the-ranks": Killer(FACTORS.format("float32"), GRADIENT),
    "ranks-after-the-sum": Killer(FACTORS.format("float16"), GRADIENT),
    "ignored-are-sharded": Killer("test_ignored and of-the-root-None", ""),
    "flat-inputs-cast-unasked": Killer(TRAINING.format("inputs-as-they-are"), OUTPUT),
    "flat-root-alone-casts": Killer("test_inputs and position-True", OUTPUT),
    "flat-recomputed-inputs-not-cast": Killer(RECOMPUTED, "CheckpointError"),
    "flat-reduced-in-the-dtype-of-compute": Killer(TRAINING.format("bf16-fp32"), GRADIENT),
    "flat-gradients-stay-low": Killer(TRAINING.format("bf16"), "has dtype torch.bfloat16; the baseline has"),
    "flat-buffers-in-the-dtype-of-compute": Killer(TRAINING.format("bf16"), OUTPUT),
    "flat-buffers-of-the-outermost-unit": Killer("test_precision and test_buffers and w2-False", OUTPUT),
    "flat-buffers-cast-anew": Killer("test_running_statistics and w2-torch.bfloat16", "an evaluation diverges"),
    "flat-integers-cast": Killer("test_precision and test_buffers and w2-False", ""),
    "flat-buffers-saved-as-they-are": Killer("test_buffers and w2-True", "is saved in torch.float16"),
}


cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
