"""Bugs where no case had looked before each fail the case that was written for them, in one run."""

from __future__ import annotations

import pytest

from tests.harness import planted_corners as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers, few_by_day

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

LENT, CLASSES = "test_containers_that_a_script_passes and w2-{}", "test_classes_of_containers and w2-{}"
DIMENSIONS, WRONG = "test_named_dimensions and {}-equal", "test_wrong_dimensions and {}"
SETTINGS, NOT_REFUSED = "test_settings_that_cannot_be and w2-{}", "no rank refuses it"
WHOLE, COPIES = "test_whole_parameters_that_cannot_be and w2-{}", "test_whole_state_dicts_are_copies and w2-{}"
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
    "dimensions-of-the-root-alone": Killer(
        "test_joined_dimensions and replicas-of-context-parts", "1D or 2D DeviceMesh"
    ),
    "shards-over-the-first-dimension": Killer(DIMENSIONS.format("tp-shard"), ""),
    "strided-by-earlier-dimensions": Killer(DIMENSIONS.format("tp-shard"), "is placed"),
    "cut-again": Killer(WRONG.format("cut-already"), NOT_REFUSED),
    "named-replicas-in-any-order": Killer("test_named_replicas_in_different_orders", "gradient of"),
    "no-dimension-named": Killer(WRONG.format("no-name"), "the error names none of"),
    "one-tensor-by-rows": Killer("test_some_parameters and one-lists", ""),
    "first-one-scaled": Killer("test_some_parameters and some-one-by-one", "clipped gradient of"),
    "size-as-choice": Killer(SETTINGS.format("a-size"), NOT_REFUSED),
    "no-inputs-in-flight": Killer(SETTINGS.format("no-inputs"), NOT_REFUSED),
    "half-an-input": Killer(SETTINGS.format("half"), NOT_REFUSED),
    "no-unit-ahead": Killer(SETTINGS.format("a-layer"), NOT_REFUSED),
    "a-unit-alone-begins": Killer("test_a_unit_by_itself and w2-later", ""),
    "a-unit-alone-goes-on": Killer("test_a_unit_by_itself and w2-later", ""),
    "smaller-shards-of-rows": Killer("test_other_dimensions_after_forward and last", "than its placement claims"),
    "size-of-the-mesh-kept": Killer("test_size_of_the_mesh and w2-False", "other parameters than the optimizer's"),
    "extensions-beside-each-other": Killer("test_tensors_that_choose and w2-class-None", "a gathered tensor begins at"),
    "extensions-resharded": Killer("test_groups_of_two", ""),
    "cut-parameters-resharded": Killer("test_tensor_parallel_groups", ""),
    "lists-do-not-compute": Killer("test_list_that_computes", "containers that do not implement forward"),
    "beside-an-ignored-one": Killer("test_ignored_beside_another", ""),
    "one-unit-on-the-meta-device": Killer("test_forward_on_the_meta_device and one-unit", ""),
    "freed-while-recomputed": Killer(
        "test_one_gather_serves_a_span and None-None-two-layers and not reentrant", "collectives in backward of"
    ),
    "factors-below-one-ignored": Killer("test_divide_factors and w2-shards-below-one", "gradient of"),
    "added-at-the-beginning": Killer("test_memory_of_a_script", "in the second step (step 1)"),
    "shards-from-the-beginning": Killer("test_memory_of_a_script", "gradient of"),
    "first-hook-alone": Killer("test_post_accumulate_hook_runs", "the second hooks on parameters run for"),
    "no-hook-without-rows": Killer("test_post_accumulate_hook_runs", "each parameter's hook runs once"),
    "pending-sum-taken": Killer("test_gradient_that_is_a_pending_sum", "together, has the norm 2"),
    "freed-by-gradients-of-a-forward": Killer(
        "test_gradients_within_forward and of-a-unit-None", "mixed torch.Tensor and DTensor"
    ),
    "reentrant-not-ahead": Killer("test_the_same_order and reentrant-call", "backward without recomputation"),
    "no-such-dimension-is-the-first": Killer("test_what_cannot_be_sharded and no-such-dimension", NOT_REFUSED),
    "placements-not-compared": Killer("test_parameter_of_another_layout and w2-placement", "the error names none of"),
    "sizes-not-compared": Killer("test_parameter_of_another_layout and w2-size", ""),
    "gathered-as-before-a-cast": Killer(
        "test_cast_after_an_evaluation and None-True", "Expected out tensor to have dtype"
    ),
    "older-hook-without-metadata": Killer("test_older_form_of_a_hook", "'NoneType' object is not subscriptable"),
    "hooks-get-the-replicas": Killer("test_hooks_beside_replicas", "must match the size of tensor"),
    "placement-not-looked-at": Killer("test_what_cannot_be_sharded and cuts-nothing", NOT_REFUSED),
    "no-pieces-of-nothing": Killer("test_what_cannot_be_sharded and no-elements", "refused after these collectives"),
    "sharded-once-more": Killer("test_what_cannot_be_sharded and module-once-more", "the error names none of"),
    "ends-compared-among-some": Killer("test_ranks_of_one_unit_differ", ""),
    "load-keeps-a-gather": Killer(
        "test_of_a_module_inside_a_unit and None-pending", "the forward after loading layers.1.first has other values"
    ),
    "input-at-the-first-place": Killer("test_memory_of_a_script", "the input begins at element 0 of the output"),
    "sums-for-all-units": Killer("test_sums_alone and w2", "a unit for which nothing was set is reduced by"),
    "extensions-cut-by-rows": Killer("test_tensors_cut_along_another_dimension", "exceeds dimension size"),
    "hooks-of-shards-of-before": Killer("test_shards_in_the_place_of_others", "were called 0 times"),
    "replicated-is-sharded": Killer("test_replicated_module and w2-None", ""),
    "replicate-is-not-told": Killer("test_replicating_what_is_sharded and a-unit", NOT_REFUSED),
    "flat-first-applied-is-the-root": Killer("test_function_for_every_module and w2-shards-originals", ""),
    "flat-buffers-of-wrappers": Killer("test_whole_parameters and w2-None-read-originals", ""),
    "flat-whole-is-thawed": Killer("test_whole_frozen_parameters and w2-flat", "requires_grad of whole parameters"),
    "flat-first-rank-keeps-changes": Killer(WHOLE.format("changes"), "are not refused"),
    "flat-whole-in-a-forward": Killer(WHOLE.format("in-a-forward"), ""),
    "flat-gradients-on-the-cpu": Killer("test_whole_parameters_that_cannot_be and on-the-cpu", "are not refused"),
    "flat-reduces-by-anything": Killer("test_reduction and test_function_that_cannot_be_called", NOT_REFUSED),
    "flat-ignored-by-units-alone": Killer("test_ignored_inside_a_unit", "the shared parameter is"),
    "flat-of-any-size": Killer("test_parameter_of_another_layout and flat-size", "the error names none of"),
    "flat-replicas-by-themselves": Killer("test_what_cannot_be_sharded and without-groups", NOT_REFUSED),
    "flat-replicas-on-any-mesh": Killer("test_what_cannot_be_sharded and three-dimensions", NOT_REFUSED),
    "flat-integers": Killer("test_what_cannot_be_sharded and w2-integers", NOT_REFUSED),
    "flat-function-not-looked-at": Killer("test_init and test_function_that_cannot_be_called", "is not callable"),
    "flat-ignored-by-one-option": Killer("test_what_cannot_be_sharded and ignored-by-two", NOT_REFUSED),
    "flat-classes-that-look-on": Killer("test_recurrent_module and w2-None-originals", "size mismatch"),
    "flat-any-answer": Killer("test_answers_that_a_rule and a-number", NOT_REFUSED),
    "flat-function-divided-again": Killer("test_what_a_function_writes and w4-shards", "where the function wrote 3"),
    "flat-frozen-shown-with-gradients": Killer(
        "test_frozen_between_microbatches and weights", "frozen parameters have"
    ),
    "flat-without-gradients-compared": Killer("test_forwards_without_gradients and original", ""),
    "flat-recovers-while-recomputing": Killer(
        "test_recomputed_spans_of_microbatches", "gradient of 'layers.0.in_proj.bias'"
    ),
    "flat-freed-by-gradients-of-a-forward": Killer(
        "test_gradients_within_forward and of-a-unit-None", "must be a matrix, got 1-D tensor"
    ),
    "flat-unreduced-shown-in-backward": Killer(
        "test_recomputed_spans_of_microbatches", "must match the size of tensor"
    ),
    "flat-some-are-all": Killer("test_gradients_that_a_script_dropped_of_some", "gradient of"),
    "flat-optimizers-of-flat-parameters": Killer("test_steps_in_backward_of_flat", "no rank refuses them"),
    "flat-gradients-after-their-step": Killer("test_steps_in_backward and w2-None", "backward leaves gradients"),
    "flat-older-on-all-ranks": Killer("test_older_calls and w2-first-rank-originals", "rank 1 has"),
    "flat-older-not-sent": Killer("test_older_calls and w2-first-rank-originals", "KeyError: 'state'"),
    "flat-numbers-of-sorted-names": Killer("test_by_numbers and originals", ""),
    "flat-names-of-an-optimizer": Killer("test_an_optimizer_that_names_parameters and originals", ""),
    "flat-names-with-wrappers": Killer("test_an_optimizer_that_names_parameters and w2-flat", ""),
    "flat-shapes-for-numbers": Killer("test_states_that_cannot_be_joined and w2-shapes", "the error names none of"),
    "flat-dtype-of-the-first": Killer("test_states_that_cannot_be_joined and another-dtype", "no rank refuses them"),
    "flat-local-not-loaded": Killer("test_local_states and originals", "Missing key(s)"),
    "flat-first-place-alone": Killer("test_module_in_two_places and classes", "must be a matrix"),
    "flat-numbers-of-steps-shared": Killer(COPIES.format("full-replicas-alone-originals"), "step of"),
    "flat-loaded-numbers-shared": Killer(COPIES.format("full-originals"), "loaded before it of"),
}

cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
