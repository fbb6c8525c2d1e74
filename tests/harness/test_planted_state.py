"""Bugs of state dicts and of whole parameters each fail a case that names them."""

from __future__ import annotations

import pytest

from tests.harness import planted_state as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers, few_by_day

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

KILLED = {
    "gathered-is-saved": Killer("test_between_passes and w2-False-originals-sharded", "0"),
    "no-hook-before-loading": Killer(
        "test_loading_between_passes and w2-False-evaluation-sharded",
        "Error(s) in loading state_dict for FSDPStateful:",
    ),
    "no-hook-before-saving": Killer("test_between_passes and w2-False-originals-sharded", "0"),
    "assigned-not-taken": Killer(
        "test_values_of_the_first_rank and w2-others-strict",
        "FSDP parameters should be materialized from meta device befo",
    ),
    "first-owner-alone": Killer("test_names_and_values and w2-wrapper-sharded", "the model is not sharded: sharding"),
    "stale-is-kept": Killer(
        "test_second_evaluation and w2-False",
        "the sharded run diverges from the baseline: output of 'evaluation, tensor 0' in the second step (step 1)",
    ),
    "version-not-noted": Killer(
        "test_many_forwards and w2-False", "three evaluations before the first step (step 0) gather ['(r"
    ),
    "unshard-forgets": Killer(
        "test_many_forwards and w2-True", "three evaluations before the first step (step 0) gather ['(r"
    ),
    "always-stale": Killer(
        "test_many_forwards and w2-False", "three evaluations before the first step (step 0) gather ['(r"
    ),
    "flat-names-of-wrappers": Killer(
        "test_between_passes and w2-False-originals-full",
        "a state dict is not that of the unsharded model: parameter after step of 'layers.0.base'",
    ),
    "flat-all-ranks": Killer(
        "test_between_passes and w2-False-originals-first-rank",
        "a state dict is not of the form 'first-rank': parameter after step of 'layers.0.gain'",
    ),
    "flat-wrong-first-rank": Killer(
        "test_between_passes and w2-False-originals-first-rank",
        "a state dict is not of the form 'first-rank': parameter after step of 'layers.0.gain'",
    ),
    "flat-buffers-on-all-ranks": Killer(
        "test_between_passes and w2-False-originals-first-rank",
        "a state dict is not of the form 'first-rank': parameter after step of 'layers.0.offset'",
    ),
    "flat-shards-are-whole": Killer(
        "test_between_passes and w2-False-originals-sharded",
        "a state dict is not of the form 'sharded': parameter after step of 'layers.0.base'",
    ),
    "flat-flat-parameter-too": Killer(
        "test_between_passes and w2-None-flat-full",
        "a state dict is not that of the unsharded model: parameter after step of '_flat_param'",
    ),
    "flat-first-name-alone": Killer(
        "test_between_passes and w2-None-flat-full",
        "a state dict is not that of the unsharded model: parameter after step of 'layers.0.second.weight'",
    ),
    "flat-last-owner-alone": Killer(
        "test_between_passes and w2-None-flat-full",
        "a state dict is not that of the unsharded model: parameter after step of 'layers.0.second.weight'",
    ),
    "flat-rows-of-the-next-rank": Killer(
        "test_between_passes and w2-False-originals-sharded",
        "what ranks hold differs from a state dict: parameter after step of 'layers.0.gain'",
    ),
    "flat-shards-keep-all-alive": Killer(
        "test_between_passes and w2-False-originals-sharded",
        "a state dict is not of the form 'sharded': parameter after step of \"the model's state dict\"",
    ),
    "flat-placed-as-replicas": Killer(
        "test_between_passes and w2-False-originals-sharded",
        "a state dict is not that of the unsharded model: parameter after step of 'layers.0.base'",
    ),
    "flat-settings-of-the-root-alone": Killer(
        "test_between_passes and w2-False-originals-sharded",
        "All FSDP modules must have the same state dict settings. Got",
    ),
    "flat-missing-not-reported": Killer(
        "test_entries_that_do_not_fit and w2-missing-in-a-unit-lenient",
        "loading reports {'missing': [], 'unexpected': []}; the unsha",
    ),
    "flat-first-missing-ends": Killer(
        "test_entries_that_do_not_fit and w2-missing-in-a-unit-lenient",
        "layers.1.second.bias has the old values instead of the new",
    ),
    "flat-loaded-at-offset-zero": Killer(
        "test_onto_other_units and w2-other-units-originals-full",
        "what ranks hold differs from a state dict: parameter after step of 'layers.1.gain'",
    ),
    "flat-first-piece-not-loaded": Killer(
        "test_onto_other_units and w2-other-units-originals-full",
        "what ranks hold differs from a state dict: parameter after step of 'layers.1.gain'",
    ),
    "flat-steps-not-counted": Killer("test_step_that_changes and w2-False", ""),
    "flat-optimizer-everywhere": Killer(
        "test_between_passes and w2-False-originals-first-rank",
        "a state dict is not of the form 'first-rank': optimizer state of 'out.weight: step'",
    ),
    "flat-optimizer-groups-dropped": Killer(
        "test_between_passes and w2-False-originals-full",
        "a state dict is not that of the unsharded model: optimizer state of 'param_groups'",
    ),
    "flat-optimizer-groups-by-first-name": Killer(
        "test_between_passes and w2-None-flat-full",
        "a state dict is not that of the unsharded model: optimizer state of 'param_groups'",
    ),
    "flat-optimizer-whole-in-shards": Killer(
        "test_between_passes and w2-False-originals-sharded",
        "a state dict is not of the form 'sharded': optimizer state of 'out.weight: exp_avg'",
    ),
    "flat-optimizer-own-rank-alone": Killer(
        "test_between_passes and w2-False-originals-full",
        "whole state dicts differ between ranks: optimizer state of",
    ),
    "flat-optimizer-wrong-offset": Killer(
        "test_between_passes and w2-False-originals-full",
        "what ranks hold differs from a state dict: optimizer state of 'layers.0.gain: exp_avg'",
    ),
    "flat-optimizer-scalars-dropped": Killer(
        "test_between_passes and w2-False-originals-full",
        "what ranks hold differs from a state dict: optimizer state of 'layers.0.gain'",
    ),
    "flat-optimizer-keeps-its-groups": Killer(
        "test_onto_other_units and w2-other-units-originals-full",
        "two state dicts that should be equal differ: optimizer state of 'group 0: eps'",
    ),
    "flat-optimizer-first-group": Killer(
        "test_onto_other_units and w2-other-units-originals-full",
        "two state dicts that should be equal differ: optimizer state of 'group 1: lr'",
    ),
    "flat-optimizer-state-of-the-first-rank": Killer(
        "test_onto_other_units and w2-other-units-originals-full",
        "what ranks hold differs from a state dict: optimizer state of 'layers.1.first.weight: exp_avg'",
    ),
    "flat-optimizer-not-sent": Killer("test_into_a_new_optimizer and w2-first-rank-originals", "'state'"),
    "flat-optimizer-shape-of-flat": Killer(
        "test_onto_other_units and w2-other-units-originals-full",
        "what ranks hold differs from a state dict: optimizer state of 'layers.0.gain: step'",
    ),
    "flat-optimizer-joined-at-zero": Killer(
        "test_onto_other_units and w2-other-units-flat-full",
        "what ranks hold differs from a state dict: optimizer state of 'layers.1.gain: exp_avg'",
    ),
    "flat-optimizer-joined-drops-the-last": Killer(
        "test_onto_other_units and w2-other-units-flat-full",
        "what ranks hold differs from a state dict: optimizer state of 'layers.1.second.bias: exp_avg'",
    ),
    "flat-optimizer-zero-steps": Killer(
        "test_onto_other_units and w2-other-units-flat-full",
        "what ranks hold differs from a state dict: optimizer state of 'layers.1.gain: step'",
    ),
    "flat-optimizer-part-of-state": Killer(
        "test_between_passes and w2-None-flat-full",
        "what ranks hold differs from a state dict: optimizer state of 'layers.0.base: exp_avg'",
    ),
    "flat-whole-stale-on-one-rank": Killer("test_whole_parameters and w2-None-first-rank-originals", ""),
    "flat-whole-writes-lost": Killer(
        "test_whole_parameters and w2-None-written-originals",
        "layers.0.in_proj.weight has other values after the context",
    ),
    "flat-whole-writes-always": Killer(
        "test_whole_parameters and w2-None-read-originals", "layers.0.in_proj.weight has other values after the context"
    ),
    "flat-whole-on-all-ranks": Killer(
        "test_whole_parameters and w2-None-first-rank-originals",
        "this rank has 1656 of 1656 elements, although the first rank",
    ),
    "flat-whole-of-the-root-alone": Killer(
        "test_whole_parameters and w2-None-read-originals", "layers.0.in_proj.weight has the shape (162,)"
    ),
    "flat-whole-shards-not-registered": Killer(
        "test_whole_parameters and w2-None-read-originals", "layers.0.in_proj.weight has other values after the context"
    ),
    "flat-whole-still-summoned": Killer(
        "test_whole_parameters and w2-None-read-originals",
        "Cannot manually unshard parameters when already unsharding p",
    ),
    "flat-whole-in-place-skipped": Killer(
        "test_whole_parameters and w2-None-written-originals",
        "layers.0.in_proj.weight has other values after the context",
    ),
    "flat-whole-gradients-lost": Killer(
        "test_whole_gradients and w2-None-True",
        "two runs that should be equal differ: parameter after step of 'layers.0.in_proj.bias' in the first step",
    ),
    "flat-whole-gradients-always": Killer(
        "test_whole_gradients and w2-None-False",
        "two runs that should be equal differ: parameter after step of 'layers.0.in_proj.bias' in the first step",
    ),
    "flat-whole-gradients-of-this-rank": Killer(
        "test_whole_gradients and w2-None-False", "layers.0.out_proj.weight has no whole gradient"
    ),
    "flat-whole-gradients-not-restored": Killer(
        "test_whole_gradients and w2-None-False",
        "two runs that should be equal differ: parameter after step of 'layers.0.in_proj.bias' in the first step",
    ),
}


cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
