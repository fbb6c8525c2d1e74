"""How far a run is from a profile: of a fixed number of items, and what is missing."""

import dataclasses
import json

import pytest

from shardproof import contract
from shardproof.__main__ import main
from shardproof.reports.profiles import standings
from shardproof.runfile import parse_run
from tests.reports import samples

ITEMS = {f"suites/a.py::test_x[w{ranks}-{end}]": (ranks, end) for ranks in (2, 4) for end in ("a", "b", "streams")}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A contract of six items, and a profile that wants the optimizer's state sharded."""
    needs = {"a": frozenset(), "b": frozenset({"hybrid"}), "streams": frozenset({"flat-parameters"})}
    items = {
        id_: contract.Item(("X-1", "Y-1"), ranks, needs[end], frozenset({"streams"} & {end}))
        for id_, (ranks, end) in ITEMS.items()
    }
    other = {"suites/a.py::test_other[w2]": contract.Item(("Y-1",), 2, frozenset(), frozenset())}
    profile = contract.Profile(
        "us", frozenset({"cpu-4", "nccl-2"}), frozenset({"optimizer"}), frozenset({"hybrid"}), frozenset({"X-1"})
    )
    wide = dataclasses.replace(
        profile, classes=frozenset({"cpu-4"}), shards=frozenset(), requirements=frozenset({"Y-1"})
    )
    monkeypatch.setattr(contract, "items", lambda: items | other)
    monkeypatch.setattr(contract, "profiles", lambda: {"ours": profile, "wide": wide})


def run_of(**verdicts):
    """A run on the CPU with these verdicts of the items w2_a, w4_b and so on; others passed, or None did not run."""
    told = {"w2_a": "pass", "w2_b": "pass", "w4_a": "pass", "w4_b": "pass"} | verdicts
    cases = [
        samples.case(
            id=f"suites/a.py::test_x[{name.replace('_', '-')}]", implementation="theirs", device="cpu", verdict=verdict,
            missing=["hybrid"] if verdict == "unsupported" else [], expected="F029.py" * (verdict == "expected-fail"),
        )
        for name, verdict in told.items() if verdict
    ]  # fmt: skip
    data = samples.journal(*cases)
    known = {"version": "1", "capabilities": [], "shards": ["optimizer"]}
    data["environment"] |= {"implementations": {"theirs": known}, "device": "cpu", "nccl": None, "torch": "2.15.0+cpu"}
    return data


def ours(data):
    return standings(parse_run(data))[0]


def test_all_items_of_the_class_are_the_denominator():
    found = ours(run_of())
    assert (found.items, found.passed, found.is_reached, found.cell, found.missing) == (4, 4, True, "reached", "")
    assert (found.profile, found.hardware, found.torch) == ("ours", "cpu-4", "2.15.0")


@pytest.mark.parametrize(
    ("verdict", "cell", "missing"),
    [
        ("unsupported", "3/4", "lacks hybrid (1)"),
        ("unmet", "3/4", "lacks (the run file does not name what is missing) (1)"),
        ("expected-fail", "3/4", "fails F-29 (1)"),
        ("fail", "3/4", "fails suites/a.py::test_x[w4-b] (1)"),
        ("unexpected-pass", "3/4", "fails suites/a.py::test_x[w4-b] (1)"),
        (None, "3/4 +1", "1 not run"),
    ],
)
def test_only_a_pass_counts(verdict, cell, missing):
    found = ours(run_of(w4_b=verdict))
    assert (found.items, found.passed, found.is_reached) == (4, 3, False)
    assert (found.cell, found.missing) == (cell, missing)


def test_what_shards_nothing_reaches_no_profile_of_sharding():
    data = run_of()
    told = data["environment"]["implementations"]["theirs"]
    told["shards"] = []
    assert (ours(data).is_reached, ours(data).missing) == (False, "not known to shard optimizer")
    told["capabilities"] = ["sharded"]  # as files of earlier versions have it
    assert ours(data).is_reached


def test_on_gpus_the_class_has_other_items_and_fewer_profiles():
    data = run_of()
    data["environment"] |= {"device": "cuda", "nccl": "2.28.9"}
    for case in data["cases"]:
        case["device"] = "cuda"
    [found] = standings(parse_run(data))
    assert (found.hardware, found.profile, found.items, found.is_reached) == ("nccl-2", "ours", 2, True)
    data["environment"]["nccl"] = None  # ranks that share a GPU
    assert standings(parse_run(data)) == []


def test_the_command_prints_each_class_and_torch(tmp_path, capsys):
    older, newer = run_of(), run_of(w2_a="fail")
    older["environment"]["torch"] = "2.11.0"
    (tmp_path / "a").write_text(json.dumps(older))
    (tmp_path / "b").write_text(json.dumps(newer))
    assert main(["report", "--profiles", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[2:] == [
        "cpu-4 (CPU, gloo, up to 4 ranks), torch 2.11.0:",
        "          ours     wide",
        "  theirs  reached  4/5 +1",
        "  theirs, wide: 1 not run",
        "",
        "cpu-4 (CPU, gloo, up to 4 ranks), torch 2.15.0:",
        "          ours  wide",
        "  theirs  3/4   3/5 +1",
        "  theirs, ours: fails suites/a.py::test_x[w2-a] (1)",
        "  theirs, wide: fails suites/a.py::test_x[w2-a] (1); 1 not run",
    ]
