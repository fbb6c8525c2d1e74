"""`shardproof submit`: what it refuses, in one line each, and what the folder of a results repository then has."""

import json
import re
import socket
from functools import reduce
from operator import getitem
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from shardproof import contract
from shardproof.__main__ import main
from shardproof.runfile import digest_of, fingerprint
from tests.reports import samples
from tests.reports.pages import Page

ROOT = Path(__file__).parents[2]
IDS = ["s.py::test_a[w2]", "s.py::test_b[w2]"]
ITEMS = {id_: contract.Item(("X-1",), int(id_[-2]), frozenset(), frozenset()) for id_ in [*IDS, "s.py::test_c[w8]"]}
CORE = contract.Profile("all", frozenset({"nccl-2"}), frozenset(), frozenset(), frozenset({"X-1"}))


@pytest.fixture
def submit(tmp_path, capsys, monkeypatch):
    """Submits runs, given as JSON values, under a small contract; returns the exit code and what was printed."""
    monkeypatch.setattr(contract, "versions", lambda: {"2026.12": ""})
    monkeypatch.setattr(contract, "items", lambda version=None: ITEMS)
    monkeypatch.setattr(contract, "profiles", lambda: {"core": CORE})

    def submit(*runs, to="results", options=()):
        for number, data in enumerate(runs):
            (tmp_path / f"run{number}").write_text(json.dumps(data))
        paths = [str(tmp_path / f"run{number}") for number in range(len(runs))]
        return main(["submit", *paths, "--to", str(tmp_path / to), *options]), "".join(capsys.readouterr())

    return submit


def made(number=1, *names, verdicts=("pass", "expected-fail"), **environment):
    """A run file on GPUs as its run has written it, as JSON values."""
    names = names or ["reference"]
    given = [(name, id_, verdict) for name in names for id_, verdict in zip(IDS, verdicts, strict=False)]
    cases = [samples.case(implementation=name, id=id_, verdict=one, device="cuda") for name, id_, one in given]
    data = samples.journal(*cases) | {"run_id": f"{number}" * 32}
    told = {name: {"version": "0.1.0"} for name in names}
    data["environment"] |= {"contract": "2026.12", "implementations": told} | environment
    return data | {"digest": digest_of(map(fingerprint, data["cases"]))}


def left_behind(folder, name):
    """A badge of a result that the index names and that no summary has any more."""
    (folder / "badges" / name).touch()
    rows = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps([*rows, rows[0] | {"badge": f"badges/{name}"}]))


def put(value, *place):
    """Return what sets a value in a run file."""
    return lambda data: reduce(getitem, place[:-1], data).__setitem__(place[-1], value)


REFUSED = [
    (put("pass", "cases", 1, "verdict"), r"digest: it is \w{12}, that of the records \w{12}: one was changed, .* lost"),
    (lambda data: data.update(made(verdicts=["pass"]), digest=data["digest"]), r"digest: it is .* lost"),
    (lambda data: data["cases"].pop(), r"end.complete: true, but 's.py::test_b\[w2\]' was selected .*"),
    (lambda data: data.update(made(verdicts=["pass"])),
     r"cases: reference has no record of 1 of 2 items of contract 2026.12 on nccl-2, such as s.py::test_b\[w2\]"),
    (put("at\n/home/alice/x.py:3", "cases", 0, "nodeid"), r"cases\[0\].nodeid: has a private path: /home/alice/x.py"),
    (put(["--report", "/root/out"], "environment", "command"), r"environment.command\[1\]: .* path: /root/out"),
    (put(1, "cases", 0, "parameters", "/nfs/Users/al/x"), r"a key of cases\[0\].parameters: .*: /nfs/Users/al/x"),
    (put(["in /scratch/some7/x"], "end", "problems"), r"end.problems\[0\]: has a private path: /scratch/some7/x"),
    (put("Linux node17 6.1", "environment", "platform"), r"environment.platform: names a host: Linux node17 6.1"),
    (put(["gpu", "gpu"], "cases", 0, "hosts"), r"cases\[0\].hosts\[0\]: names a host: gpu"),
    (put("", "digest"), r"digest: it is missing; --without-digest takes files of older runs"),
    (put("../x", "run_id"), r"run_id: '../x' is no id of a run"),
    (put({"complete": False, "reason": "SIGTERM"}, "end"), r"it is incomplete \(SIGTERM\)"),
    (put([{"file": "a", "run_id": "2", "environment": {}}], "merged"), r"merged: submit the run files that .*"),
    (put("", "environment", "device"), r"environment.device: it is missing"),
    (put(None, "environment", "nccl"), r"environment.nccl: it is missing, and 'cuda' needs it"),
    (put("../2", "environment", "torch"), r"environment.torch: '../2' is no version"),
    (put(None, "environment", "cpu_count"), r"environment.cpu_count: it is missing"),
    (put([], "environment", "accelerators"), r"environment.accelerators: it is empty"),
    (
        put([{"name": "X"}], "environment", "accelerators"),
        r"environment.device: 'cuda' has too few ranks for .* nccl-2",
    ),
    (put("2020.1", "environment", "contract"), r"environment.contract: '2020.1' is none of 2026.12"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "why"), REFUSED, ids=range(len(REFUSED)))
def test_a_file_that_cannot_be_published_is_refused_in_one_line(change, why, submit, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    monkeypatch.setenv("HOME", "/net/some7")
    data = made()
    change(data)
    code, printed = submit(made(2), data)
    assert code == 2 and re.fullmatch(rf"shardproof: \S+/run1: {why}\n", printed), printed
    assert not (tmp_path / "results").exists()


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_index_the_badges_and_the_page_are_the_same_in_any_order(submit, tmp_path):
    runs = [
        made(1, "torch.fsdp", "reference", torch="2.13.0+cpu"),
        made(2, "torch.fsdp", torch="2.9.1", verdicts=["pass", "unsupported"]),
        made(3, "torch.fsdp", torch="2.15.0", verdicts=["pass", "unmet"], contract=""),
        made(4, "mine:<b>/x", verdicts=["pass", "pass"]),
    ]
    results = tmp_path / "results"
    assert submit(*runs)[0] == 0
    assert [submit(one, to="other")[0] for one in reversed(runs)] == [0, 0, 0, 0]
    left_behind(tmp_path / "other", "gone-nccl-2.svg")
    assert submit(runs[0], to="other")[1].split(": ")[1].startswith("4 runs, ")
    assert content(results) == content(tmp_path / "other")
    index = json.loads((results / "index.json").read_text())
    names = ("implementation", "contract", "torch", "score", "profiles")
    assert [tuple(row[name] for name in names) for row in index] == [
        ("reference", "2026.12", "2.13.0", "1/2", {"core": "1/2"}),
        ("mine:<b>/x", "2026.12", "2.11.0", "2/2", {"core": "reached"}),
        ("torch.fsdp", "2026.12", "2.13.0", "1/2", {"core": "1/2"}),
        ("torch.fsdp", "2026.12", "2.9.1", "1/1", {"core": "1/2"}),
        ("torch.fsdp", "before 2026.12", "2.15.0", "1/1", {"core": "1/2"}),
    ]
    badges = {path.name: ElementTree.parse(path).getroot()[0].text for path in (results / "badges").iterdir()}
    assert badges == {
        "reference-nccl-2.svg": "reference: shardproof 2026.12 nccl-2: 1/2",
        "torch.fsdp-nccl-2.svg": "torch.fsdp: shardproof 2026.12 nccl-2: 1/2",
        "mine%3A%3Cb%3E%2Fx-nccl-2.svg": "mine:<b>/x: shardproof 2026.12 nccl-2: 2/2",
    }
    summary = json.loads((results / index[0]["summary"]).read_text())
    assert summary["implementations"]["reference"]["failed"] == {"expected-fail": [IDS[1]]}
    page = Page((results / "index.html").read_text())
    links = {value for name, value in page.attributes if name == "href" and not value.startswith("#")}
    assert len(links) == 8 and all((results / unquote(link)).is_file() for link in links), links
    assert not page.scripts.keys() - {"style"} and ("b", []) not in page.elements


def test_a_run_of_a_profile_has_its_items_alone(submit, tmp_path, monkeypatch):
    """It is no newer result of all items: it stands beside that, under its own badge."""
    small = contract.Profile("less", frozenset({"nccl-2"}), frozenset(), frozenset(), frozenset({"Y-1"}))
    monkeypatch.setattr(contract, "profiles", lambda: {"core": CORE, "small": small})
    monkeypatch.setitem(ITEMS, IDS[0], contract.Item(("X-1", "Y-1"), 2, frozenset(), frozenset()))
    less = made(2, verdicts=["pass"], started="2030-01-01") | {"effort": {"name": "standard", "profile": "small"}}
    code, printed = submit(made(1, started="2026-01-01"), less)
    assert code == 0, printed
    index = json.loads((tmp_path / "results/index.json").read_text())
    found = [(row["badge"], row["score"], row["profiles"], row.get("profile")) for row in index]
    assert found == [
        ("badges/reference-nccl-2-small.svg", "1/1", {"small": "reached"}, "small"),
        ("badges/reference-nccl-2.svg", "1/2", {"core": "1/2", "small": "reached"}, None),
    ]
    badge = (tmp_path / "results/badges/reference-nccl-2-small.svg").read_text()
    assert "reference: shardproof 2026.12 nccl-2 small: 1/1" in badge
    assert "1/1 <small>of small</small>" in (tmp_path / "results/index.html").read_text()
    for profile, why in {
        "core": r"cases: reference has no record of 1 of 2 items of profile core of contract 2026.12 on nccl-2, .*",
        "huge": "effort.profile: 'huge' is none of core, small",
    }.items():
        code, printed = submit(less | {"effort": {"name": "standard", "profile": profile}})
        assert code == 2 and re.fullmatch(rf"shardproof: \S+/run0: {why}\n", printed), printed


def test_a_summary_without_digest_says_so_and_one_that_was_moved_is_refused(submit, tmp_path):
    assert submit(made() | {"digest": ""}, options=["--without-digest"])[0] == 0
    assert (tmp_path / "results/index.html").read_text().count("no digest") == 2, "the newest, and the history"
    (path,) = (tmp_path / "results/runs").rglob("*.json")
    moved, where = path.rename(path.with_name("other.json")), path.relative_to(tmp_path / "results")
    assert submit() == (2, f"shardproof: {moved}: it is the summary of {where}\n")
    moved.write_text("{}")
    assert submit() == (2, f"shardproof: {moved}: the file: the field 'run_id' is missing\n")


@pytest.mark.nightly  # it reads all published runs, for a minute
def test_the_example_is_that_of_the_published_runs(tmp_path):
    """After a change of the contract or the page, docs/results.md has the command that makes it anew."""
    expected = content(ROOT / "examples/results-repository")
    published = sorted(map(str, (ROOT / "reports/published").glob("*.json.gz")), reverse=True)
    assert main(["submit", *published, "--to", str(tmp_path), "--without-digest"]) == 0
    assert expected.keys() - content(tmp_path).keys() == {"README.md", ".github/workflows/results.yml"}
    assert content(tmp_path).items() <= expected.items() and sum(map(len, expected.values())) < 1_000_000
