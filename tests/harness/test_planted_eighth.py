"""Bugs that two readers wrote into the flat reference each fail the case that was written for them."""

from __future__ import annotations

import pytest

from tests.harness import planted_eighth as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers, few_by_day

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

CALLS = "test_answers and w2-{}"
KILLED = {
    "flat-own-buffers-alone-restored": Killer(CALLS.format("buffers-that-are-saved"), "'torch.bfloat16'] instead of"),
    "flat-renamed-twice-in-loads": Killer(CALLS.format("loaded-into-what-is-recomputed"), "in loading state_dict"),
    "flat-ignored-counts-as-meta": Killer(CALLS.format("buffers-on-the-meta-device"), "instead of 0"),
    "flat-norm-always-wide": Killer(CALLS.format("norm-of-low-gradients"), "torch.float32 instead of torch.bfloat16"),
    "flat-gradients-not-cast": Killer(CALLS.format("gradients-of-a-cast-model"), "['torch.float32'] instead of"),
    "flat-drops-plain-modules": Killer(CALLS.format("beside-a-plain-module"), "[] instead of"),
    "flat-keys-of-wrappers": Killer(CALLS.format("keys-that-do-not-fit"), "_fsdp_wrapped_module"),
    "flat-states-by-numbers-always": Killer(CALLS.format("states-for-a-named-optimizer"), "False instead of True"),
    "flat-replicas-may-change": Killer("test_parameters_of_replicas_that_a_script_cannot", "no rank refuses it"),
}

cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_reference_passes_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
