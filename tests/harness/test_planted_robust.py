"""Bugs of recovery, of settings, of hooks, of several backwards and models, and of lifetimes each fail a case."""

from __future__ import annotations

import pytest

from tests.harness import planted_robust as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers, few_by_day

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

FORWARD, BACKWARD = (f"test_exception and w2-{phase}-None" for phase in ("forward", "backward"))
LATER = "test_exception_in_a_later_microbatch and w4-last-{}"
KILLED = {
    "stays-in-its-phase": Killer(FORWARD, ""),
    "gathers-in-flight-kept": Killer(BACKWARD, ""),
    "not-freed-by-the-reset": Killer(FORWARD, ""),
    "unreduced-gradients-kept": Killer(BACKWARD, ""),
    "gradients-in-the-reduce-dtype-kept": Killer("test_exception_while_gradients and w2-forward", ""),
    "all-reduce-not-resumed": Killer("test_reduction_over_replicas_waits and ended-by-all-all", ""),
    "partial-shards-kept": Killer(LATER.format("forward-2-all-reduce"), ""),
    "order-kept": Killer("test_exception_in_a_recomputation and w2-call", ""),
    "end-of-backward-queued-for-ever": Killer(BACKWARD, ""),
    "reset-of-the-root-alone": Killer(FORWARD, ""),
    "function-before-the-all-reduce": Killer("test_function_after_the_reduction and w2-replicas-a-layer", ""),
    "function-for-all-units": Killer("test_function_after_the_reduction and w2-shards-the-root", ""),
    "gather-for-all-units": Killer("test_collectives_of_a_script and w2-the-root", ""),
    "reduction-for-all-units": Killer("test_collectives_of_a_script and w2-the-root", ""),
    "gather-in-other-memory": Killer("test_collectives_of_a_script and w2-a-layer", ""),
    "sums-not-taken-back": Killer("test_sums_alone and w2", ""),
    "reduce-group-not-taken-back": Killer("test_reductions_have_a_group and w4-True", ""),
    "reduce-group-for-all-units": Killer("test_reductions_have_a_group and w4-False", ""),
    "gathers-in-the-reduce-group": Killer("test_reductions_have_a_group and w4-True", ""),
    "resharding-of-all-units": Killer("test_resharding_is_changed and w2-at-once-the-root", ""),
    "resharding-not-of-the-root": Killer("test_resharding_is_changed and w2-at-once-the-root", ""),
    "no-list-is-an-empty-one": Killer("test_prefetching_is_taken_back", "with the lists taken back"),
    "resharding-only-off": Killer("test_resharding_is_changed and w2-between-steps-a-layer", ""),
    "gathered-in-backward-anyway": Killer("test_backward_gathers_a_unit_or_not and w2-a-layer", ""),
    "zeros-of-all-units": Killer("test_zeros_are_reduced_or_not and w2-the-root", ""),
    "zeros-not-taken-back": Killer("test_zeros_are_reduced_or_not and w2-the-unit", ""),
    "zeros-of-nobody": Killer("test_ranks_use_different_parameters and w4-shards", ""),
    "sequence-by-name": Killer("test_ranks_issue_one_sequence and w2-0", ""),
    "second-backward-without-an-end": Killer("test_two_backwards and w2-retained-graph-None", ""),
    "freed-before-the-hooks-of-a-script": Killer("test_hooks_of_a_script and w2-None", ""),
    "gathered-after-the-hooks-of-a-script": Killer("test_hooks_of_a_script and w2-None", ""),
    "outputs-of-gathers-kept": Killer("test_fifty_steps and w2-None", ""),
    "units-kept-by-a-list": Killer("test_deleted_model_is_freed_at_once and w2-after-a-step-None", ""),
    "shares-kept-after-the-step": Killer("test_what_is_held and w2-shards", "holds 3.00 times its share"),
    "flat-shares-kept-after-the-step": Killer("test_what_is_held and w2-shards", "holds 3.00 times its share"),
    "flat-kept-after-forward": Killer(FORWARD, ""),
    "flat-never-recovers": Killer(BACKWARD, ""),
    "flat-kept-after-backward": Killer(BACKWARD, ""),
    "flat-unreduced-gradients-kept": Killer(LATER.format("backward-1-reduction"), ""),
    "flat-unreduced-for-ever": Killer("test_exception_in_a_later_microbatch and deferred-forward-1-reduction", ""),
    "flat-recovery-of-the-root-alone": Killer(BACKWARD, ""),
    "flat-hook-of-the-root-alone": Killer("test_function_in_place_of_the_reduction and w2-shards", ""),
    "flat-hook-of-a-copy": Killer("test_function_in_place_of_the_reduction and w2-shards", ""),
    "flat-hook-inside-no-sync": Killer("test_function_in_place_of_the_reduction and w2-shards", ""),
    "flat-gathers-before-though-after": Killer("test_when_backward_gathers_ahead and w2-after-backward", ""),
    "flat-gathers-though-never": Killer("test_when_backward_gathers_ahead and w2-never", ""),
    "flat-forward-never-gathers-ahead": Killer("test_forward_gathers_ahead and w2-True", ""),
    "flat-forward-always-gathers-ahead": Killer("test_forward_gathers_ahead and w2-False", ""),
    "flat-forward-gathers-itself-ahead": Killer("test_forward_gathers_ahead and w2-True", ""),
    "flat-hook-of-what-is-divided": Killer("test_function_in_place_of_the_reduction and w2-shards", ""),
    "flat-gradients-kept": Killer("test_fifty_steps and w2-None", ""),
    "flat-kept-without-gradients": Killer("test_gradient_of_the_input_alone and w2-None", ""),
    "flat-units-kept-by-a-list": Killer("test_deleted_model_is_freed_at_once and w2-after-a-step-None", ""),
}


cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
