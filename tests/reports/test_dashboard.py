"""A run of profiles as a dashboard takes it, and the lines by which a CI is red."""

import json

import pytest

from shardproof import contract
from shardproof.__main__ import main
from shardproof.reports.dashboard import dashboard
from shardproof.runfile import parse_run
from tests.reports import samples

NONE = frozenset()
NAMES = ("ours", "theirs")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A contract of five items and two profiles: the first has four, the second one."""
    items = {f"a{number}": contract.Item((f"X-{number % 2}", "X-9"), 2, NONE, NONE) for number in range(4)}
    items["b"] = contract.Item(("Y-1",), 2, NONE, NONE)
    every = frozenset(contract.CLASSES)
    profiles = {
        "core": contract.Profile("", every, NONE, NONE, frozenset({"X-0", "X-1", "Z-1"})),
        "zero3": contract.Profile("", every, NONE, NONE, frozenset({"Y-1"})),
    }
    monkeypatch.setattr(contract, "items", lambda version=None: items)
    monkeypatch.setattr(contract, "profiles", lambda: profiles)


def run_of(verdicts, *, left_out=(), exit_code=1, problems=(), profile="core,zero3", message="it differs"):
    """A run of both profiles on another vendor's device; what is in no argument passed."""
    listed, cases = contract.items(), []
    out = [{"id": id_, "implementation": "ours", "reason": "--seconds 530 are over"} for id_ in left_out]
    for id_, item in listed.items():
        if id_ not in left_out:
            verdict = verdicts.get(id_, "pass")
            fields = {"requirement": ", ".join(item.requirements), "implementation": "ours", "device": "npu"}
            failure = samples.failure(message) if verdict in ("fail", "unexpected-pass") else None
            cases.append(samples.case(id=id_, verdict=verdict, failure=failure, expected="", missing=[], **fields))
    data = samples.journal(*cases)
    data["environment"] |= {
        "device": "npu",
        "nccl": None,
        "backend": "hccl",
        "torch": "2.13.0",
        "torch_git_version": "c0ffee",
    }
    data["environment"]["implementations"] = {"ours": {"version": "3", "capabilities": []}}
    data |= {"effort": {"name": "standard", "profile": profile, "deselected": {}}, "selected": {"ours": [*listed]}}
    data["left_out"] = out
    data["end"] = {"complete": True, "reason": "", "exit_code": exit_code, "seconds": 7.5, "problems": [*problems]}
    data.pop("digest", None)
    return data


def of(*arguments, **keywords):
    return dashboard(parse_run(run_of(*arguments, **keywords)))


def test_each_item_is_in_one_count():
    found = of({"a0": "fail", "a1": "expected-fail", "a2": "unsupported"}, left_out=["a3"])
    core, zero3 = found.profiles
    assert (core.profile, core.hardware, core.items, core.version) == ("core", "accelerator-2", 4, "3")
    assert (core.passed, core.failed, core.known_failures, core.skipped, core.left_out, core.not_run) == (
        0,
        1,
        1,
        1,
        1,
        0,
    )
    # A requirement without an item on the class is none of the profile here; a skipped case checks nothing.
    assert (core.covered, core.requirements) == (2, 2)
    assert (zero3.profile, zero3.items, zero3.passed, zero3.covered) == ("zero3", 1, 1, 1)
    assert found.test_results == {"passed": 1, "failed": 1, "skipped": 3, "total": 5}


def test_a_requirement_is_covered_by_what_ran():
    core, _ = of({"a0": "unsupported", "a2": "unmet"}, exit_code=0).profiles
    assert (core.covered, core.requirements) == (1, 2)


def test_the_run_has_its_place_and_time():
    found = of({}, exit_code=0)
    assert (found.verdict, found.why, found.failed_requirements) == ("passed", [], [])
    assert (found.device, found.backend, found.torch, found.revision) == ("npu", "hccl", "2.13.0", "c0ffee")
    assert (found.seconds, found.exit_code) == (7.5, 0)


def test_a_failed_requirement_has_the_message_of_its_first_case():
    found = of({"a0": "fail", "a2": "fail"})
    told = {one.requirement: (one.message, one.failed, [*one.cases]) for one in found.failed_requirements}
    assert told == {"X-0": ("it differs", 2, ["a0", "a2"]), "X-9": ("it differs", 2, ["a0", "a2"])}
    assert found.failed_tests_detail[0] == {"name": "a0", "classname": "ours", "message": "it differs"}


def test_the_profiles_are_those_of_the_command():
    assert [one.profile for one in of({}, profile="core").profiles] == ["core"]


def test_the_details_fit_into_one_variable(monkeypatch):
    found = of({f"a{number}": "fail" for number in range(4)}, message="é" * 5000)
    assert all(len(one["message"].encode()) <= 1024 for one in found.failed_tests_detail)
    monkeypatch.setattr("shardproof.reports.dashboard._ALL_BYTES", 7000)
    few = of({f"a{number}": "fail" for number in range(4)}, message="é" * 5000).failed_tests_detail
    assert 0 < len(few) < 4 and len(json.dumps([*few])) <= 7000


@pytest.mark.parametrize(
    ("verdicts", "exit_code", "problems", "lines"),
    [
        ({"a1": "expected-fail"}, 0, [], ["GREEN: no failure but known ones"]),
        ({"a0": "fail"}, 1, [], ["RED: new failure: a0 on ours: it differs"]),
        ({"a0": "unexpected-pass"}, 1, [], ["RED: fails no more: a0 on ours: it differs"]),
        ({}, 1, ["ours.toml: entry 1 expired"], ["RED: ours.toml: entry 1 expired"]),
        ({}, 3, [], ["RED: exit code 3"]),
    ],
)
def test_a_line_for_each_cause_that_a_run_is_red(tmp_path, capsys, verdicts, exit_code, problems, lines):
    file, written = tmp_path / "run.json", tmp_path / "dashboard.json"
    file.write_text(json.dumps(run_of(verdicts, exit_code=exit_code, problems=problems)))
    assert main(["report", "--profiles", str(file), "--json", str(written)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(("RED", "GREEN"))] == lines
    found = json.loads(written.read_text())
    assert found["verdict"] == ("failed" if exit_code else "passed")
    assert [f"RED: {one}" for one in found["why"]] == [one for one in lines if "exit code" not in one and "RED" in one]


def test_an_incomplete_run_is_red():
    data = run_of({}, exit_code=0)
    data["end"] |= {"complete": False, "reason": "interrupted by Ctrl-C"}
    found = dashboard(parse_run(data))
    assert (found.verdict, [*found.why]) == ("failed", ["incomplete: interrupted by Ctrl-C"])


def test_the_json_is_of_one_run_and_of_profiles(tmp_path, capsys):
    file, other = tmp_path / "run.json", tmp_path / "other.json"
    for one in (file, other):
        one.write_text(json.dumps(run_of({})))
    for words in ([str(file)], ["--profiles", str(file), str(other)]):
        assert main(["report", *words, "--json", str(tmp_path / "x.json")]) == 2
        assert "--json is of one run, with --profiles" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
