"""docs/matrix.md and README's table of implementations are those that the published run files give."""

import gzip
import importlib
import json
import re
from pathlib import Path

import pytest

from shardproof import contract
from shardproof.findings import KnownFinding
from tests.harness.inner import python
from tests.reports import samples

ROOT = Path(__file__).parents[1]
FAILURE = samples.failure("no")
THREAD = "https://github.com/pytorch/pytorch/issues/1 open: the norm"
FINDINGS = {
    "F-2": KnownFinding(
        Path("F002.py"), "torch `clip_grad_norm_`: the inf-norm raises", "", True, (), upstream=(THREAD,)
    ),
    "F-3": KnownFinding(Path("F003.py"), "alone", "", True, ()),
}


@pytest.fixture
def matrix(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "docs")
    module = importlib.import_module("matrix")
    monkeypatch.setattr(module, "PUBLISHED", tmp_path)
    return module


@pytest.fixture
def place(matrix):
    return matrix.Place("Anywhere", "CPU", "2.15", ("run.json",))


def record(id, implementation="theirs", *, requirement="CLIPPING-1", **fields):
    return samples.case(id=id, implementation=implementation, requirement=requirement, **fields)


def write_run(folder, *cases):
    data = samples.journal(*cases)
    names = {case["implementation"] for case in cases}
    data["environment"]["implementations"] = {name: {"version": "0.5", "capabilities": []} for name in names}
    (folder / "run.json").write_text(json.dumps(data))


def made(matrix, place):
    return matrix.page({place: matrix.run_of(place)}, FINDINGS).splitlines()


@pytest.mark.nightly
def test_the_page_and_the_table_are_up_to_date():
    python("docs/make.py", "--check", "matrix", "readme", code=0)


def test_published_runs_are_as_publish_writes_them(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    publish = importlib.import_module("publish")
    for path in (ROOT / "reports/published").glob("*.json.gz"):
        data = json.loads(gzip.decompress(path.read_bytes()))
        assert publish.slim(data) == data, f"{path.name} has measurements that docs/publish.py leaves out"
        most = 150_000 * len({case["implementation"] for case in data["cases"]})
        assert path.stat().st_size <= most, f"{path.name} has more than {most} bytes"


def test_what_no_finding_explains_is_described():
    text = (ROOT / "docs/matrix.md").read_text()
    assert len(text.encode()) <= 44_000, "one page, of which the page of results has the rest"
    lines = text.splitlines()
    unexplained = [re.search(r"`([^`]*)`", line)[1] for line in lines if line.startswith("| **not explained**")]
    described = (ROOT / "reports/published/README.md").read_text()
    assert [case for case in unexplained if case.partition("::")[2] not in described] == []


def test_chapters_have_what_passed_of_what_was_asked(matrix, place, tmp_path):
    known = {"verdict": "expected-fail", "failure": FAILURE, "expected": "fail: raises (F-3)"}
    write_run(
        tmp_path,
        record("one"),
        record("two", requirement="CLIPPING-2, STATE-1", **known),
        record("three", requirement="STATE-1", verdict="unsupported", missing=["clipping"]),
        record("one", "reference", requirement="CLIPPING-1", verdict="unmet", missing=["streams"]),
        record("four", "reference", requirement="STATE-1"),
    )
    lines = made(matrix, place)
    rows = ["chapter | reference 0.5 | theirs 0.5", "CLIPPING | - | 1 of 2", "STATE | 1 of 1 | 0 of 1"]
    rows += ["*all* | 1 of 1 | 1 of 2", "*unsupported* | 0 | 1", "*unmet* | 1 | 0"]
    assert {f"| {row} |" for row in rows} <= {*lines}


def test_failures_are_explained_by_their_findings(matrix, place, tmp_path):
    write_run(
        tmp_path,
        record("a", verdict="expected-fail", failure=FAILURE, expected="fail: the norm raises (findings/F002.py)"),
        record("b", verdict="expected-fail", failure=FAILURE, expected="fail: it is so (docs/findings.md, F-3)"),
        record("c", verdict="expected-fail", failure=FAILURE, expected="hang: nobody knows | really"),
        *(record(f"d[{n}]", requirement="STATE-4", verdict="crash", failure=FAILURE) for n in (1, 2)),
        *(record(f"d[{n}]", "reference", requirement="STATE-4", verdict="crash", failure=FAILURE) for n in (1, 2)),
    )
    lines = made(matrix, place)
    assert lines[lines.index("## CPU: failures") + 4 :] == [
        "| reference | - |",
        "| theirs | [F-2] 1, [F-3] 1, hang: nobody knows \\| really 1 |",
        "",
        "## Failures that no finding explains",
        "",
        "Of all published runs; [what is known of them](../reports/published/README.md).",
        "",
        "| failure | run |",
        "|---|---|",
        "| **not explained**: 2 crash of `d[1]`, `[2]` | reference, theirs; Anywhere |",
        "",
        "[F-2]: ../findings/F002.py",
        "[F-3]: ../findings/F003.py",
    ]


def test_the_index_has_the_findings_with_their_threads(matrix):
    make = importlib.import_module("make")
    assert make.findings_page(FINDINGS.values()).splitlines()[-2:] == [
        "| [F-2](../findings/F002.py) | torch `clip_grad_norm_`: the inf-norm raises |  | the reproducer was not run | "
        "[pytorch/pytorch#1](https://github.com/pytorch/pytorch/issues/1), open: the norm |",
        "| [F-3](../findings/F003.py) | alone |  | the reproducer was not run |  |",
    ]


def test_the_table_has_an_implementation_with_the_newest_torch_of_each_column(matrix, place, tmp_path, monkeypatch):
    none = frozenset()
    few = contract.Profile("us", frozenset({"cpu-4"}), none, none, frozenset({"CLIPPING-1"}))
    items = dict.fromkeys("ab", contract.Item(("CLIPPING-1",), 2, none, none))
    monkeypatch.setattr(contract, "items", lambda version=None: items)
    monkeypatch.setattr(contract, "profiles", lambda: {"few": few})
    write_run(tmp_path, record("a"), record("b", verdict="fail", failure=FAILURE), record("a", "reference"))
    newest = matrix.run_of(place)
    write_run(tmp_path, record("a"), record("b"), record("a", "older"))
    places = (("CPU", "2.13"), ("GPUs", "2.11"))
    older, gpus = (matrix.Place("Elsewhere", *there, ("run.json",)) for there in places)
    runs = {place: newest, older: matrix.run_of(older), gpus: matrix.run_of(gpus)}
    rows = matrix.table(runs).splitlines()
    assert matrix.table(runs, ["theirs"]).splitlines() == [*rows[:2], rows[5]]
    assert rows == [
        "| implementation | on | few | passed of asked |",
        "|---|---|---|---|",
        "| `reference` | CPU, torch 2.15 | 1/2 +1 | 1 of 1 |",
        "| `older` | CPU, torch 2.13 | 1/2 +1 | 1 of 1 |",
        "| `older` | GPUs, torch 2.11 | 1/2 +1 | 1 of 1 |",
        "| `theirs` | CPU, torch 2.15 | 1/2 | 1 of 2 |",
        "| `theirs` | GPUs, torch 2.11 | reached | 2 of 2 |",
    ]


def test_a_run_file_that_is_missing(matrix, place):
    with pytest.raises(ValueError, match=r"run\.json"):
        matrix.run_of(place)
