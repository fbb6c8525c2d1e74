"""`--explain`: what it leaves as it is, what it says where nothing diverges, and that no other run captures."""

from __future__ import annotations

import pytest

from tests.harness import planted
from tests.harness import planted_explained as bugs
from tests.harness.test_planted_explained import explained

pytestmark = pytest.mark.slow("the tests share runs of the cases, with ranks of their own")

#: A plugin with which passing cases run once more as well.
EVERY_CASE = """
from shardproof.harness.findings.verdict import Verdict
from shardproof.harness.plugin import explaining
explaining._EXPLAINED = (*explaining._EXPLAINED, Verdict.PASS)
"""

SOUND = ["reference", "reference.flat", "torch.fully_shard", "torch.fsdp"]


@pytest.fixture
def every(tmp_path, monkeypatch):
    """Run the sound implementations' cases twice, and return the records."""
    (tmp_path / "every_case.py").write_text(EVERY_CASE)

    def every(names, expression):
        monkeypatch.setattr("tests.harness.test_planted_explained.PYTHONPATH", f"{tmp_path}:{planted.PYTHONPATH}")
        cases, _ = explained(names, expression, tmp_path, "-p", "every_case", "--explain", passes=True)
        return [case for case in cases if case["verdict"] != "unsupported"]

    return every


def assert_unchanged(cases):
    """Check that a run with capture on has the same bits, sees the model's modules, and finds no divergence."""
    for case in cases:
        found, who = case["explanation"], f"{case['implementation']} {case['id']}"
        assert found["again"] == "pass", f"{who}: {found['text']}"
        assert found["alike"], f"{who}: losses or distances differ"
        assert found["first"] is None, f"{who}: {found['text']}"
        assert found["compared"] > 20, who


def test_capture_changes_nothing(every):
    cases = every(["reference", "torch.fsdp"], "test_tower and w2 or test_recomputed")
    assert_unchanged(cases)
    assert len(cases) == 4


@pytest.mark.nightly
def test_capture_changes_nothing_anywhere(every):
    cases = every(SOUND, "test_")
    assert_unchanged(cases)
    assert {case["implementation"] for case in cases} == set(SOUND)


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """The records of failures without a divergence of a second run, and what pytest printed."""
    names = map(planted.name_of, (bugs.Unsteady, bugs.Raising))
    return explained([*names], "test_tower and w2", tmp_path_factory.mktemp("explained"), "--explain")


def record_of(cases, bug):
    (case,) = [case for case in cases if case["implementation"].endswith(f":{bug.__name__}")]
    return case


def test_a_failure_that_does_not_come_again(failures):
    case = record_of(failures[0], bugs.Unsteady)
    assert case["verdict"] == "fail", "the first run decides"
    assert (case["explanation"]["again"], case["explanation"]["alike"]) == ("pass", False)
    told = "explained: the case ran once more, with capture on, and passed: the failure is not steady (flaky)\n"
    assert f"\n{told}collectives: every rank issued the same on each group (" in case["failure"]["text"]


def test_an_error_says_how_far_the_step_came(failures):
    case = record_of(failures[0], bugs.Raising)
    found = case["explanation"]
    assert found["alike"]
    assert found["stopped"] == "output of a module of '(root)'"
    assert "a step stopped after the output of a module of '(root)'" in case["failure"]["text"]


def test_a_failure_ends_with_the_line_that_repeats_it(failures):
    cases, printed = failures
    for case in cases:
        last = case["failure"]["text"].splitlines()[-1]
        assert f"\n{last}\nreproduce: {case['reproduce']}\n" in printed
        assert "--explain" not in case["reproduce"]


@pytest.mark.nightly
def test_workers_explain_too_and_nobody_unasked(tmp_path):
    names = [*map(planted.name_of, (planted.ForgottenDivision, planted.DroppedReduction))]
    alone, _ = explained(names, "test_tower and w2", tmp_path, "--explain")
    workers, _ = explained(names, "test_tower and w2", tmp_path, "--explain", "-n", "2")
    firsts = [{case["implementation"]: case["explanation"]["first"] for case in cases} for cases in (alone, workers)]
    assert firsts[0] == firsts[1]
    assert all(firsts[0].values())
    ordinary, _ = explained(names, "test_tower and w2", tmp_path)
    assert not any("explanation" in case for case in ordinary)
