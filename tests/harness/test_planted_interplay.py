"""Bugs in what units are given, in settings that meet and in refusals each fail a case, in one run."""

from __future__ import annotations

import pytest

from tests.harness import planted_interplay as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers, few_by_day

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

COMBINED, SETTING = "test_what_cannot_be_combined and {}", "test_settings_that_cannot_be and {}"
ANOTHER, NOT_REFUSED = "test_another_collective_in_the_place", "no rank refuses it"
SEVERAL, SINCE_FORWARD = "test_casts_of_several_modules", "test_evaluation_between_forward_and_backward and once"
AMONG_FEWER = "test_gather_of_a_script_among_fewer_ranks and a-layer"
KILLED = {
    "infinity-as-a-number-alone": Killer("test_some_parameters and one-infinity-as-a-word", "not supported between"),
    "eight-containers-deep": Killer("test_loss_of_any_one_output and w2-deep", "does it hold itself"),
    "complex-numbers-cast": Killer("test_masks_and_rotations and complex64", "the unit got"),
    "masks-cast": Killer("test_masks_and_rotations and bool", "the unit got"),
    "one-tensor-in-one-place": Killer("test_inputs_by_keyword and w2 and not reduced", "StopIteration"),
    "handles-waited-for-once": Killer("test_a_call_shows_whole and w2-True", "wait_for_unshard"),
    "handles-of-nothing": Killer("test_a_call_shows_whole and w2-None", "unshard(async_op=False) returned"),
    "no-gradients-in-evaluations": Killer("test_gradients_within_forward and in-a-unit-None", "require"),
    "hooks-with-autograd": Killer("test_post_accumulate_hook_runs_once", "in-place operation"),
    "made-for-inference-alone": Killer("test_first_forward_is_in_inference_mode and object", "nference"),
    "buffers-for-inference-alone": Killer("test_steps_of_parameters_that_inference_saw", "nference"),
    "replaced-by-state-dicts": Killer("test_steps_of_parameters_that_inference_saw", "a state dict has put other"),
    "frozen-behind-what-is-gathered": Killer("test_frozen_after_an_evaluation and w2-False-held", "is frozen"),
    "output-of-the-last-module-alone": Killer("test_output_of_one_of_several and None-of-the-first", "storage"),
    "first-factor-stays": Killer("test_divide_factor_of_another_step and not older", "element, found and expected"),
    "first-function-stays": Killer(ANOTHER, "functions [0, 0] were called"),
    "first-gather-stays": Killer(ANOTHER, "were used"),
    "a-group-for-each-unit": Killer("test_reductions_have_a_group and w2 and True", "two units have two groups"),
    "units-without-parameters-gathered": Killer("test_a_unit_without_parameters", "'NoneType' object"),
    "units-without-parameters-gather-nothing": Killer("test_a_unit_without_parameters", "'NoneType' object"),
    "all-reduces-of-nobody-deferred": Killer("test_deferred_all_reduce_without and w2", "has no gradient"),
    "every-unit-ends-backward": Killer("test_zeros_are_reduced_or_not and all-units", "reductions of two units"),
    "refused-once": Killer("test_forward_on_the_meta_device and whole-model", "the error names none of"),
    "children-of-another-root": Killer(COMBINED.format("a-unit-of-another-root"), NOT_REFUSED),
    "dimensions-without-names": Killer(COMBINED.format("dimensions-of-a-mesh"), "the error names none of"),
    "a-choice-of-inputs": Killer(SETTING.format("a-choice-of-inputs"), NOT_REFUSED),
    "dicts-of-modules": Killer("test_what_cannot_be_sharded and a-dict", "ModuleDict"),
    "dtypes-of-compute-compared": Killer("test_trainable_of_another_dtype", "dtype"),
    "first-inputs-cast": Killer(SEVERAL, "dtype"),
    "one-module-waits-for-others": Killer(
        "test_after_the_forward_of_one_module and w2-True-layers.0", "mixed torch.Tensor and DTensor"
    ),
    "wholes-divided": Killer("test_uneven_parts_of_tensor_parallelism", "Sizes of tensors must match"),
    "two-replicas-compared": Killer("test_replicas_in_different_orders and w6", "diverges from the baseline"),
    "graphs-dropped-by-copies": Killer(
        "test_gradients_of_gradients and None-in-float32", "the gradients have no graph of"
    ),
    "views-without-gaps": Killer("test_output_changed_in_place and w2", "storage of size 0"),
    "last-output-cast": Killer(SEVERAL, "inputs and outputs of the modules"),
    "slots-of-another-dtype": Killer("test_frozen_integers_beside_a_cast and False", "dtype"),
    "gather-of-a-script-among-all": Killer(AMONG_FEWER, "is this rank's part"),
    "part-of-a-script-among-all": Killer(AMONG_FEWER, "exceeds dimension size"),
    "whole-zeros": Killer("test_zeros_beside_tensor_parallelism", "gradient of 'layers"),
    "classes-by-their-names": Killer("test_list_that_computes", "diverges from the baseline: output"),
    "parameters-by-their-addresses": Killer("test_parameters_in_the_place_of_others", "is shared with a parameter"),
    "kept-variables-replaced": Killer("test_attributes_of_parameters and w2-None", "has others than the parameters"),
    "prefetched-beside-others": Killer("test_prefetching_is_taken_back", "gathers before each layer"),
    "evaluations-forget-all-forwards": Killer(SINCE_FORWARD, "backward with an evaluation before it"),
    "flat-evaluations-forget-all-forwards": Killer(SINCE_FORWARD, "backward with an evaluation before it"),
    "gather-of-a-script-replaced": Killer(SETTING.format("memory-of-another-gather"), NOT_REFUSED),
}

cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
