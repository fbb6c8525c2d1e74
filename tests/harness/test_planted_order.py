"""Bugs of the check of the order are caught by the chapter about it, each by the cases that should."""

from __future__ import annotations

import pytest

from tests.harness import planted_order as planted
from tests.harness.planted import name_of, run_suites

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which each planted bug has ranks of its own")

FIRST, LATER, EVALUATION, COST = (
    "test_ranks_differ_in_the_first_iteration",
    "test_a_later_iteration_differs",
    "test_evaluation_is_not_compared",
    "test_comparing_costs_the_first_iteration_alone",
)
CASES = "test_order.py and w2 and original-True and not w2-3"
CAUGHT = {
    planted.AlwaysAgrees: {FIRST: "DID NOT RAISE"},
    planted.ComparesForever: {LATER: "Forward order differs across ranks", COST: "assert 5 <= 0"},
    planted.ChecksEvaluation: {EVALUATION: "warned although the order is that of the first iteration"},
    planted.WarnsAgain: {LATER: "warned although the order is that of the first iteration"},
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What each case says of each bug and of the sound reference: {bug: {case: text}}, without the cases that pass."""
    names = ["reference", *map(name_of, CAUGHT)]
    failures = {}
    for case in run_suites(names, CASES, tmp_path_factory.mktemp("planted")):
        bug = case["implementation"].rpartition(":")[2]
        found = failures.setdefault(bug, {})
        if case["failure"]:
            found[case["id"].partition("::")[2].partition("[")[0]] = case["failure"]["text"]
    return failures


def test_the_sound_reference_passes(failures):
    assert failures["reference"] == {}


@pytest.mark.parametrize("bug", CAUGHT, ids=lambda bug: bug.name)
def test_bug_is_caught_by_its_cases_alone(failures, bug):
    found = failures[bug.__name__]
    assert found.keys() == CAUGHT[bug].keys(), found
    for case, text in CAUGHT[bug].items():
        assert text in found[case]
