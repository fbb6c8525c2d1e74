"""`shardproof report` of several runs of one commit."""

import json

import pytest

from shardproof.__main__ import main
from tests.reports import samples


@pytest.fixture
def report(tmp_path, capsys, monkeypatch):
    """Report the runs of these cases, a file each; returns the exit code and what was printed."""
    monkeypatch.chdir(tmp_path)

    def of(*runs, **other):
        names = [f"{number}.json" for number in range(len(runs))]
        for name, cases in zip(names, runs, strict=True):
            written = samples.journal(*cases)
            written["environment"] |= other if name == "1.json" else {}
            (tmp_path / name).write_text(json.dumps(written))
        code = main(["report", *names])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return of


def test_a_verdict_that_changed_says_where(report):
    steady = samples.case(id="test_b.py::test_steady[w2]")
    failed = samples.case(verdict="fail", failure={"text": "ValueError: 3"}, seeds={"init": 7})
    code, printed = report([samples.case(seeds={"init": 1}), steady], [steady, failed])
    assert (code, printed) == (
        0,
        "2 runs of c0ffeec: 2 cases, 1 with more than one verdict\n"
        "\n"
        "suites/test_autograd.py::test_unused[w2] on reference\n"
        "  pass  0.json; seeds init 1; 1 of 2; Linux, 64 cores\n"
        "  fail  1.json; seeds init 7; 2 of 2; Linux, 64 cores  ValueError: 3\n",
    )


def test_an_attempt_that_was_followed_by_another_counts(report):
    failed = samples.case(verdict="hang", failure={"text": "waits"})
    _, printed = report([failed, samples.case(attempt=2)], [samples.case()])
    assert "  hang  0.json; earlier of 1; Linux, 64 cores  waits" in printed


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"torch": "2.15.0"}, "torch 2.11.0+cu130 (70d970d), 1.json 2.15.0 (70d970d): that may be why verdicts differ"),
        ({"shardproof_commit": "unknown"}, "1.json does not say its commit: only runs of one commit can be compared"),
    ],
    ids=["torch", "commit"],
)
def test_runs_of_other_code_are_refused(report, other, line):
    code, printed = report([samples.case()], [samples.case()], **other)
    assert code == 2 and printed.strip().endswith(line) and printed.count("\n") == 1
