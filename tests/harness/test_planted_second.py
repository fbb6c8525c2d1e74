"""Bugs that a second look found each fail the case that was written or extended for them, in one run."""

from __future__ import annotations

import pytest

from tests.harness import planted_second as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers, few_by_day

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

COMBINED, UNNAMED = "test_what_cannot_be_combined and {}", "the error names none of"
NOT_REFUSED, OLDER = "no rank refuses it", "uses what one before it has left gathered"
ROOT, REPLACED = "test_calls_that_only_the_root_has and {}", "test_steps_of_parameters_that_a_script_replaced and {}"
WRONG = "test_parameters_that_a_script_cannot_replace and {}"
KILLED = {
    "frozen-scalars-taken": Killer("test_what_cannot_be_sharded and a-frozen-scalar", "the error names none of"),
    "transposed-matrices-taken": Killer("test_what_cannot_be_sharded and w2-strides", "sharded with other strides"),
    "gathered-from-the-meta-device": Killer("test_forward_on_the_meta_device and one-unit", "the error names none of"),
    "memory-of-a-script-replaced": Killer(
        "test_settings_that_cannot_be and memory-of-another and not gather", NOT_REFUSED
    ),
    "any-unit-recovers": Killer(ROOT.format("recovering"), NOT_REFUSED),
    "padding-not-asked-for": Killer("test_inputs_without_padding and none", "rank 0 is missing"),
    "meshes-without-names-beside-cut-layers": Killer(COMBINED.format("cut-layers-beside-a-mesh"), UNNAMED),
    "plain-parameters-taken": Killer(COMBINED.format("a-plain-parameter"), UNNAMED),
    "streams-beside-replicas": Killer(COMBINED.format("a-stream-beside"), NOT_REFUSED),
    "strides-of-nothing": Killer("test_attributes_of_parameters and w2-None", "'stride': (0, 1)"),
    "padding-left": Killer("test_padding_that_a_hook_leaves", "expanded size"),
    "replaced-in-one-place": Killer("test_tied_after_assigning", "after the load the parameters are"),
    "second-place-left": Killer("test_tied_after_assigning", "after the load the parameters are"),
    "steps-of-loaded-parameters-not-counted": Killer(REPLACED.format("assigned"), OLDER),
    "partial-sums-in-the-dtype-of-shards": Killer("test_deferred_all_reduces_of_different and w2", "the baseline has"),
    "gathers-in-vain-kept": Killer("test_what_is_gathered_in_vain", "the gathers of forwards and of backwards are"),
    "modules-to-come-kept": Killer("test_exception_before_another_path and another-order", "collective"),
    "modules-that-did-not-run-kept": Killer("test_modules_of_a_unit_in_another_order", "3 all_gather instead of 2"),
    "outermost-after-a-failed-forward": Killer("test_first_forward_that_raises and input-original", "warned although"),
    "a-unit-alone-stays-outermost": Killer("test_forward_after_that_of_a_unit and a-unit-False", "before a change"),
    "evaluations-gather-nothing-ahead": Killer("test_prefetch and test_order", "computes in the evaluation before"),
    "evaluations-stay-in-the-order": Killer("test_evaluations_add_no_gather and w2-None", "all_gather instead of"),
    "ended-early-taken-to-compute": Killer("test_span_that_ends_within and w2-None", "diverges from the baseline"),
    "factors-of-each-replica": Killer("test_divide_factors and w2-replicas-of-one-unit-float32", "the baseline has"),
    "flat-a-group-beside-a-mesh": Killer(COMBINED.format("w2-a-group-beside-a-mesh"), NOT_REFUSED),
    "flat-units-of-both-kinds": Killer(COMBINED.format("other-parameters-inside"), NOT_REFUSED),
    "flat-bounds-of-the-root": Killer(COMBINED.format("other-bounds-inside"), NOT_REFUSED),
    "flat-rules-beside-wrappers": Killer(COMBINED.format("a-rule-beside-wrappers"), UNNAMED),
    "flat-ignored-wrappers": Killer(COMBINED.format("an-ignored-wrapper"), NOT_REFUSED),
    "flat-forms-that-differ": Killer(COMBINED.format("w2-forms-that-differ"), NOT_REFUSED),
    "flat-any-configuration": Killer(COMBINED.format("an-optimizers-configuration"), NOT_REFUSED),
    "flat-second-function-taken": Killer("test_a_second_function", NOT_REFUSED),
    "flat-function-for-replicas-taken": Killer("test_function_for_shards_with_replicas", NOT_REFUSED),
    "flat-function-gets-a-share-of-nothing": Killer(
        "test_function_in_place_of_the_reduction and w2-replicas-alone", "a share exactly where"
    ),
    "flat-half-divided-after-a-function": Killer(
        "test_what_a_function_writes and shards", "where the function wrote 3"
    ),
    "flat-any-place-replaced": Killer(WRONG.format("in-one-of-two-places"), NOT_REFUSED),
    "flat-larger-shapes-taken": Killer(WRONG.format("another-shape"), "the error names none of"),
    "flat-steps-of-the-replaced-not-counted": Killer(REPLACED.format("one-by-one"), OLDER),
    "flat-replaced-before-backward": Killer(WRONG.format("before-backward"), NOT_REFUSED),
    "flat-frozen-parts-thawed": Killer("test_frozen_beside_tensor_parallelism and middle", "requires_grad is True"),
    "flat-saved-inside-whole-ones": Killer("test_saving_where and in-the-context-flat", "saved with other values"),
    "flat-other-shapes-written-back": Killer("test_whole_parameters_of_another_shape", "accept what the others refuse"),
    "flat-unreduced-among-whole-ones": Killer("test_whole_gradients_between_microbatches", "must match the size"),
    "flat-unreduced-hidden-by-a-cast": Killer("test_gradients_that_a_script_drops and after-a-cast", "gradient of"),
    "flat-any-unit-clips": Killer(ROOT.format("clipping"), NOT_REFUSED),
    "flat-one-number-of-one-element": Killer("test_parameters_of_one_element and full", "numbers of steps have shapes"),
    "flat-ignored-states-shared": Killer(
        "test_whole_state_dicts_are and w2-full-originals", "step of layers.0.second.bias"
    ),
    "flat-fewer-parameters-on-a-rank": Killer("test_an_optimizer_without_a_parameter", NOT_REFUSED),
    "flat-names-of-checkpointing": Killer("test_by_numbers and originals", "the model no such parameter"),
    "flat-numbers-of-the-first": Killer("test_numbers_of_steps_that_differ", NOT_REFUSED),
    "flat-ignored-have-no-number": Killer("test_states_of_ignored_parameters and full", "optimizer state of"),
    "flat-versions-of-wrappers": Killer("test_versions_of_modules and full", "_fsdp_wrapped_module"),
    "flat-order-of-a-failed-forward": Killer("test_exception_before_another_path and another-unit", "collective"),
    "flat-buffers-alone-not-made": Killer("test_values_made_on_the_meta_device and reset-buffers", ""),
    "flat-ignored-norm-wrapped": Killer("test_ignored_batch_norm", "in the place of norm"),
    "flat-norm-remembers-its-dtype": Killer("test_batch_norm_after_a_step", "must have the same dtype"),
    "flat-called-objects-do-not-recurse": Killer("test_by_choice and called-objects", "this rank's share of"),
    "flat-ended-early-frees-all": Killer("test_span_that_ends_within and w2-None", ""),
    "flat-recomputed-forwards-in-the-order": Killer(
        "test_the_unit_before_a_span and w2-before-backward-two-layers-reentrant", "is gathered late"
    ),
    "flat-buffers-of-units-not-sent": Killer("test_the_root_alone_takes", "not those of the first rank"),
    "flat-swapped-not-counted": Killer(REPLACED.format("w2-swapped-flat"), OLDER),
    "flat-by-hand-within-by-hand": Killer("test_by_hand_within_by_hand", NOT_REFUSED),
}

cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
