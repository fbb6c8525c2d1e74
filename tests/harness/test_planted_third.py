"""Bugs of jobs that stop and go on each fail the case that was written for them, in one run."""

from __future__ import annotations

import pytest

from tests.harness import planted_third as planted
from tests.harness.planted import (
    Killer,
    assert_killed,
    assert_sound_passes,
    cases_of_killers,
    few_by_day,
    name_of,
    run_suites,
)

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

ANEW = "test_process_groups_made_anew and {}"
SAVE = "test_asynchronous_save and {}"
OTHER_VALUES = "two state dicts that should be equal differ"
NO_GRAPH = "the gradients have no graph of"
KILLED = {
    "smaller-meshes-by-their-ranks": Killer(ANEW.format("w4-2-2"), ""),
    "groups-by-their-ranks": Killer(ANEW.format("w2-None-1"), ""),
    "default-mesh-of-the-first-world": Killer(ANEW.format("w2-all-ranks-by-default-1"), ""),
    "shards-move-when-gathered": Killer(SAVE.format("None-in-forward-originals"), OTHER_VALUES),
    "later-backwards-not-gathered": Killer("test_schedules_of_a_pipeline and None-GPipe", "storage of size 0"),
    "graphs-dropped": Killer("test_gradients_of_gradients and None-False", NO_GRAPH),
    "parameters-on-the-root-mesh": Killer("test_four_dimensions and w8-2x1x2x2", "is on"),
    "flat-groups-by-their-ranks": Killer(ANEW.format("w2-None-1"), ""),
    "flat-default-group-of-the-first-world": Killer(ANEW.format("w2-all-ranks-by-default-1"), ""),
    "flat-graphs-dropped": Killer("test_gradients_of_gradients and None-False", NO_GRAPH),
}

cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=planted.FLAT)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", few_by_day(KILLED, KILLED))
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])


#: Mistakes in checkpoints of an implementation's own, with words of the message.
FOUND = {
    "own-without-state": "two runs that should be equal differ",
    "own-without-rates": "after loading instead of",
    "own-first-shard": "of the whole weights is not the parameter after the step",
    "own-without-frozen": "the whole weights have the names and shapes",
}


def test_checkpoints_of_an_implementations_own(tmp_path):
    assert FOUND.keys() == planted.CHECKPOINTS.keys()
    adapters = [planted.OwnCheckpoint, *planted.CHECKPOINTS.values()]
    records = run_suites([name_of(one) for one in adapters], "test_own_checkpoint and adamw-new-run", tmp_path)
    failures = {case["implementation"].rpartition(":")[2]: case["failure"] for case in records}
    assert failures.pop("OwnCheckpoint") is None
    for name, words in FOUND.items():
        failure = failures[planted.CHECKPOINTS[name].__name__]
        assert failure is not None, f"{name} passes"
        assert words in failure["text"]


def test_gradients_and_states_that_are_not_divided(tmp_path):
    adapters = ["torch.zero_optimizer", name_of(planted.ClaimsGradients), name_of(planted.WholeState)]
    records = run_suites(adapters, "test_bytes_that_a_step_adds and w2", tmp_path)
    failures = {case["implementation"].rpartition(":")[2]: case["failure"] for case in records}
    assert failures["torch.zero_optimizer"] is None
    assert "backward adds" in failures["ClaimsGradients"]["text"]
    assert "the first step adds" in failures["WholeState"]["text"]
