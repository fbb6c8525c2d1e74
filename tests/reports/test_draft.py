"""`shardproof expectations`: a draft of known failures excuses the failures of its run, and nothing else."""

import json

import pytest
from expecttest import assert_expected_inline

from shardproof.commands.expectations import expectations
from shardproof.harness.plugin.known_failures import load_file
from tests.reports import samples

TRACEBACK = 'rank 0 of 2:\nTraceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: a "b" \\ c'
NOWHERE = {"stage": None, "step": None, "rank": None, "name": None, "element": None}
DIVERGES = {"text": "...", "stage": "gradient", "step": 0, "rank": 1, "name": "head.weight", "element": [3]}


def of(id, implementation="theirs", **more):
    return samples.case(id=f"suites/test_x.py::{id}", implementation=implementation, **more)


def failed(id, failure=DIVERGES, verdict="fail"):
    return of(id, verdict=verdict, failure=failure)


@pytest.fixture
def draft(tmp_path, capsys):
    """Draft from a run of these cases; returns the exit code and what was printed."""

    def draft(*cases, options=(), **changes):
        data = samples.journal(*cases) | changes
        names = {case["implementation"]: {"version": "", "capabilities": []} for case in cases}
        data["environment"]["implementations"] = names
        path = tmp_path / "run.json"
        path.write_text(json.dumps(data))
        code = expectations([str(path), *options])
        captured = capsys.readouterr()
        return code, captured.out or captured.err.replace(str(tmp_path), "DIR")

    return draft


def test_a_function_that_fails_alike_has_one_entry(draft):
    cases = [
        *(failed(f"test_all[w{size}]") for size in (2, 4)),
        of("test_all[w8]", verdict="unmet", missing=["eight"]),
        failed("test_all_but_one[w2]"),
        of("test_all_but_one[w4]"),
        failed("test_two_ways[w2]", {"text": TRACEBACK, **NOWHERE}, "crash"),
        failed("test_two_ways[w4]", {"text": "the rank did not answer\nits stacks", **NOWHERE}, "hang"),
        of("test_passes[w2]"),
        of("test_excused[w2]", verdict="expected-fail", expected="fail: known", failure=DIVERGES),
    ]
    code, text = draft(*cases)
    assert code == 0
    assert_expected_inline(
        text,
        """\
# Drafted from a run with torch 2.11.0+cu130 on cuda. Look into each failure
# before it is expected: it may be a defect of the implementation, of its adapter, or of the case.
implementation = "theirs"

[[expect]]
case = "suites/test_x.py::test_all[*"
verdict = "fail"
reason = "gradient of head.weight diverges in step 0 on rank 1"
link = "not looked into"

[[expect]]
case = "suites/test_x.py::test_all_but_one[w2]"
verdict = "fail"
reason = "gradient of head.weight diverges in step 0 on rank 1"
link = "not looked into"

[[expect]]
case = "suites/test_x.py::test_two_ways[w2]"
verdict = "crash"
reason = "torch.OutOfMemoryError: a \\"b\\" \\\\ c"
link = "not looked into"

[[expect]]
case = "suites/test_x.py::test_two_ways[w4]"
verdict = "hang"
reason = "the rank did not answer"
link = "not looked into"
""",
    )


def test_the_draft_excuses_what_failed_and_nothing_else(draft, tmp_path):
    cases = [failed("test_all[w2-a]"), failed("test_all[w2-b]"), failed("test_other[w2]"), of("test_all_but[w2]")]
    _, text = draft(*cases, failed("test_one[w2]", {"text": TRACEBACK, **NOWHERE}))
    path = tmp_path / "theirs.toml"
    path.write_text(text)
    name, entries = load_file(path)
    assert name == "theirs"
    matched = {
        case["id"].partition("::")[2]: [entry.reason for entry in entries if entry.matches(case["id"])]
        for case in [*cases, failed("test_one[w2]")]
    }
    diverges = ["gradient of head.weight diverges in step 0 on rank 1"]
    assert matched == {
        "test_all[w2-a]": diverges,
        "test_all[w2-b]": diverges,
        "test_other[w2]": diverges,
        "test_all_but[w2]": [],
        "test_one[w2]": ['torch.OutOfMemoryError: a "b" \\ c'],
    }


def test_the_reason_is_the_first_divergence_of_an_explained_run(draft):
    first = {key: DIVERGES[key] for key in ("step", "rank", "element")}
    first |= {"stage": "gathered parameter", "name": "low.weight", "module": "low", "parameter": "low.weight"}
    first |= {"where": "", "offset": 1, "values": {}, "ulps": {}, "also": []}
    told = {"alike": True, "compared": 1, "unseen": [], "stopped": "", "collectives": [], "text": "explained"}
    steady = failed("test_a[w2]") | {"explanation": told | {"again": "fail", "first": first}}
    unsteady = failed("test_b[w2]") | {"explanation": told | {"again": "pass", "first": None}}
    _, text = draft(steady, unsteady)
    assert [line for line in text.splitlines() if line.startswith("reason")] == [
        'reason = "first, gathered parameter of low.weight diverges in step 0 on rank 1"',
        'reason = "passed when it ran again: the failure is not steady"',
    ]


def test_one_of_several_implementations(draft):
    code, message = draft(of("test_a[w2]"), of("test_a[w2]", "ours"))
    assert (code, message) == (2, "shardproof: DIR/run.json has theirs, ours: name one with --impl\n")
    code, text = draft(of("test_a[w2]"), of("test_a[w2]", "ours"), options=["--impl", "ours"])
    assert code == 0 and 'implementation = "ours"' in text
    code, message = draft(of("test_a[w2]"), options=["--impl", "ours"])
    assert (code, message) == (2, "shardproof: the run has no case of 'ours'; it has those of theirs\n")


def test_an_incomplete_run_is_refused(draft):
    end = {"complete": False, "reason": "Ctrl-C", "exit_code": 2, "seconds": 1.0}
    code, message = draft(of("test_a[w2]"), end=end)
    assert code == 2
    assert message == "shardproof: DIR/run.json is incomplete (Ctrl-C): what fails in it is not all that fails\n"


def test_a_failure_without_a_text(draft):
    _, text = draft(failed("test_a[w2]", {"text": "\n", **NOWHERE}), of("test_b[w2]", verdict="fail"))
    assert text.count('reason = "no text"') == 2
