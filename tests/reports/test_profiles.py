"""How far a run is from a profile: of a fixed number of items, and what is missing."""

import json

import pytest

from shardproof import contract
from shardproof.__main__ import main
from shardproof.reports.profiles import standings
from shardproof.runfile import parse_run
from tests.reports import samples

NONE = frozenset()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A contract of seven items; of the first profile four can run on the CPU and two on the GPUs."""
    needs = {"a": NONE, "b": frozenset({"hybrid"}), "flat": frozenset({"flat_parameters"})}
    items = {
        f"w{ranks}-{end}": contract.Item(("X-1", "Y-1"), ranks, needs[end], NONE) for ranks in (2, 4) for end in needs
    }
    items["other"] = contract.Item(("Y-1",), 2, NONE, NONE)
    ours = contract.Profile(
        "", frozenset(contract.CLASSES), frozenset({"optimizer"}), frozenset({"hybrid"}), frozenset({"X-1"})
    )
    wide = contract.Profile("", frozenset({"cpu-4"}), NONE, frozenset({"hybrid"}), frozenset({"Y-1"}))
    monkeypatch.setattr(contract, "items", lambda version=None: items)
    monkeypatch.setattr(contract, "profiles", lambda: {"ours": ours, "wide": wide})


def run_of(verdict="pass", device="cpu", **environment):
    """A run in which three of the four items passed, and the fourth has this verdict, or did not run."""
    verdicts = {"w2-a": "pass", "w2-b": "pass", "w4-a": "pass", "w4-b": verdict}
    missing, expected = ["hybrid"] * (verdict == "unsupported"), "F029.py" * (verdict == "expected-fail")
    fields = {"implementation": "theirs", "device": device, "missing": missing, "expected": expected}
    data = samples.journal(*(samples.case(id=id_, verdict=one, **fields) for id_, one in verdicts.items() if one))
    told = {"implementations": {"theirs": {"version": "", "capabilities": [], "shards": ["optimizer"]}}}
    data["environment"] |= {"torch": "2.15.0+cpu", **told, **environment}
    return data


@pytest.mark.parametrize(
    ("verdict", "cell", "missing"),
    [
        ("pass", "reached", ""),
        ("unsupported", "3/4", "lacks hybrid (1)"),
        ("unmet", "3/4", "lacks what it does not name (1)"),
        ("expected-fail", "3/4", "fails F-29 (1)"),
        ("fail", "3/4", "fails w4-b (1)"),
        ("unexpected-pass", "3/4", "fails w4-b (1)"),
        (None, "3/4 +1", "not run: 1"),
    ],
)
def test_only_a_pass_counts(verdict, cell, missing):
    found = standings(parse_run(run_of(verdict)))[0]
    assert (found.profile, found.hardware, found.torch) == ("ours", "cpu-4", "2.15.0")
    assert (found.cell, found.missing) == (cell, missing)


@pytest.mark.parametrize(("capability", "cell"), [("hybrid", "4/4"), ("sharded", "reached")])
def test_what_shards_nothing_reaches_no_profile_of_sharding(capability, cell):
    told = {"theirs": {"version": "", "capabilities": [capability]}}  # as in files of earlier versions
    found = standings(parse_run(run_of(implementations=told)))[0]
    assert (found.cell, found.missing) == (cell, "not known to shard optimizer" * (cell != "reached"))


@pytest.mark.parametrize(
    ("nccl", "found"),
    [("2.28.9", [("nccl-2", "ours", 2, "reached")]), (None, [("accelerator-2", "ours", 2, "reached")])],
)
def test_on_gpus_the_class_has_fewer_items_and_profiles(nccl, found):
    run = parse_run(run_of(device="cuda", nccl=nccl))
    assert [(one.hardware, one.profile, one.items, one.cell) for one in standings(run)] == found


def test_the_command_prints_each_class_and_torch(tmp_path, capsys):
    for name, data in {"a": run_of(torch="2.11.0"), "b": run_of("fail")}.items():
        (tmp_path / name).write_text(json.dumps(data))
    assert main(["report", "--profiles", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "cpu-4, torch 2.11.0:",
        "        ours     wide",
        "theirs  reached  4/5 +1",
        "theirs, wide: not run: 1",
        "",
        "cpu-4, torch 2.15.0:",
        "        ours  wide",
        "theirs  3/4   3/5 +1",
        "theirs, ours: fails w4-b (1)",
        "theirs, wide: fails w4-b (1); not run: 1",
    ]


def test_the_command_says_why_it_does_not_know_the_items(monkeypatch, tmp_path, capsys):
    def no_list(version=None):
        raise contract.NoList("contract 2 is open: its items are collected, which needs torch")

    monkeypatch.setattr(contract, "items", no_list)
    (tmp_path / "a").write_text(json.dumps(run_of()))
    assert main(["report", "--profiles", str(tmp_path / "a")]) == 2
    assert capsys.readouterr().err == "shardproof: contract 2 is open: its items are collected, which needs torch\n"


@pytest.mark.parametrize(("said", "cell"), [("2", "3/4 +1"), ("1", "reached"), ("", "reached"), ("1, 2", "reached")])
def test_a_run_is_counted_by_the_items_of_its_own_version(monkeypatch, said, cell):
    newest = contract.items()
    monkeypatch.setattr(contract, "versions", lambda: {"2": "", "1": "c0ffee1"})
    lists = {"2": newest, "1": {id_: item for id_, item in newest.items() if id_ != "w4-b"}}
    monkeypatch.setattr(contract, "items", lambda version=None: lists[version or "2"])
    data = run_of(None, contract=said)
    if said in lists:  # an item was selected and has no record
        data |= {"selected": {"theirs": [*lists[said]]}, "end": {"complete": False, "reason": "SIGTERM"}}
    assert standings(parse_run(data))[0].cell == cell


def of_version(monkeypatch, *selected, profile=""):
    """A run of the newest version on the CPU, that selected these of its items and passed them."""
    monkeypatch.setattr(contract, "versions", lambda: {"2": ""})
    cases = [samples.case(id=id_, verdict="pass", implementation="theirs", seconds=1.5) for id_ in selected]
    data = samples.journal(*cases) | {"effort": {"name": "standard", "deselected": {}, "profile": profile}}
    told = {"implementations": {"theirs": {"version": "", "capabilities": [], "shards": ["optimizer"]}}}
    data["environment"] |= {"torch": "2.15.0", "contract": "2"} | told
    return data


OURS = ["w2-a", "w2-b", "w4-a", "w4-b"]


@pytest.mark.parametrize(
    ("selected", "profile", "found"),
    [
        ([*OURS, "other"], "", ["ours", "wide"]),
        ([*OURS, "other"], "ours", ["ours"]),
        (OURS, "ours", ["ours"]),
        (OURS, "wide", []),
        (OURS[:3], "ours", []),
        (OURS[:3], "", []),
    ],
    ids=["all", "all of one", "one", "of another", "narrowed", "quick"],
)
def test_a_run_has_figures_of_the_profiles_that_it_asked_for(monkeypatch, selected, profile, found):
    """A run of --effort quick selects by what is declared: with more of that it had fewer items of a profile."""
    data = of_version(monkeypatch, *selected, profile=profile)
    assert [one.profile for one in standings(parse_run(data))] == found


def test_the_command_says_what_a_profile_costs_and_why_a_run_has_none(monkeypatch, tmp_path, capsys):
    runs = {"a": of_version(monkeypatch, *OURS, profile="ours"), "b": of_version(monkeypatch, "w2-a")}
    for name, data in runs.items():
        (tmp_path / name).write_text(json.dumps(data))
    assert main(["report", "--profiles", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "cpu-4, torch 2.15.0:",
        "        ours",
        "theirs  reached",
        "",
        "theirs, ours: 4 items in 6 s",
        "",
        "theirs: no profile, because the run did not ask for all items of one: run --profile NAME, or --contract 2",
    ]
