"""Each planted bug is found by the item of its row, for the reason that the row gives; the tables fit the suites."""

import concurrent.futures
import itertools
import operator
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from planted import run, table

BUGS = table.every()
#: By day some edits are looked for only; a fixed eightieth is planted. What needs GPUs runs wherever they are.
ROWS = [
    pytest.param(bug, id=name, marks=[] if bug.is_by_day or bug.gpus else [pytest.mark.nightly])
    for name, bug in BUGS.items()
]


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """The records of the items of the bugs whose tests are selected, with the bugs and without."""
    return _records(request, tmp_path_factory, test_planted.__name__, elsewhere=False)


@pytest.fixture(scope="module")
def elsewhere(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Those of the items with another error at the places of the bugs."""
    return _records(request, tmp_path_factory, test_the_reason_is_that_of_the_bug.__name__, elsewhere=True)


def _records(
    request: pytest.FixtureRequest, folders: pytest.TempPathFactory, test: str, *, elsewhere: bool
) -> run.Records:
    chosen = [
        item.callspec.params["bug"] for item in request.session.items if getattr(item, "originalname", "") == test
    ]
    found: run.Records = {}
    by_file = operator.attrgetter("file")
    able = sorted((bug for bug in chosen if torch.cuda.device_count() >= bug.gpus), key=by_file)
    # By day there are few: one run has them all.
    groups = [able] if len(able) < 100 else [list(group) for _, group in itertools.groupby(able, key=by_file)]

    def run_one(group: list[table.Bug]) -> run.Records:
        return run.run(group, folders.mktemp("planted"), elsewhere=elsewhere)

    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as threads:
        for part in threads.map(run_one, groups):
            found |= part
    return found


def _skip_without_gpus(bug: table.Bug) -> None:
    if torch.cuda.device_count() < bug.gpus:
        pytest.skip(f"unmet: {bug.gpus} GPUs, whose streams or memory the bug is about")


@pytest.mark.parametrize("bug", ROWS)
def test_planted(records: Mapping[str, Any], bug: table.Bug) -> None:
    _skip_without_gpus(bug)
    problem = run.problem(bug, records)
    assert problem is None, problem


#: One bug of each item: what is raised at its place is not what the bugs of the item make it say.
PLACES = {bug.item: bug for bug in BUGS.values()}


@pytest.mark.nightly
@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.id) for bug in PLACES.values()])
def test_the_reason_is_that_of_the_bug(elsewhere: Mapping[str, Any], bug: table.Bug) -> None:
    _skip_without_gpus(bug)
    text = run.text_of(elsewhere[table.replaced(bug).with_bug(bug.item)])
    vague = [other.id for other in BUGS.values() if other.item == bug.item and all(says in text for says in other.says)]
    assert not vague, f"another error at {bug.place} makes {bug.item} say what it says of {vague}:\n{text}"


def test_every_edit_finds_its_place() -> None:
    """By day for those too that are planted by night: a place that has moved is noticed by whoever moves it."""
    lost = []
    for bug in BUGS.values():
        try:
            bug.edited() if bug.old is not None else bug.owner()
        except (ValueError, AttributeError) as error:
            lost.append(f"{bug.id}: {error}")
    assert not lost, "\n".join(lost)


@pytest.mark.nightly
def test_every_item_exists_and_standard_selects_it() -> None:
    """A case that gets more parameters must not lose the item of a bug, nor leave it to the longest runs."""
    by_size = {}
    names = ",".join(dict.fromkeys(bug.implementation for bug in BUGS.values()))
    for simulate in dict.fromkeys(bug.simulate for bug in BUGS.values()):
        options = ["--simulate", str(simulate)] if simulate else []
        by_size[simulate] = set(run.collected(*options, "--effort", "standard", implementations=names))
    left_out = [bug.id for bug in BUGS.values() if bug.item not in by_size[bug.simulate]]
    assert not left_out, f"bugs whose item --effort standard does not select: {left_out}"


def test_every_bug_names_a_requirement_of_its_case() -> None:
    marks = table.contract_marks()
    wrong = {bug.id: bug.requirement for bug in BUGS.values() if bug.requirement not in marks.get(bug.case, ())}
    assert not wrong, f"requirements that the mark of the bug's case does not name: {wrong}"


def test_every_requirement_and_every_case_has_a_bug() -> None:
    marks = table.contract_marks()
    requirements = {name for names in marks.values() for name in names} - {bug.requirement for bug in BUGS.values()}
    assert not requirements, f"requirements without a planted bug: {sorted(requirements)}"
    cases = marks.keys() - {bug.case for bug in BUGS.values()}
    assert not cases, f"cases without a planted bug: {sorted(cases)}"


KEPT = [
    "suites/test_x.py::test_x[reference-w2-two]",
    "suites/test_x.py::test_xy[reference-w2-two]",
    "suites/test_x.py::test_xy[reference.flat-w2-one]",
]


def _bug(name: str, item: str) -> table.Bug:
    return table.Bug(name, "X-1", "fsdp_impl.x:y", "old", "new", f"suites/test_x.py::{item}", ("it says so",))


def test_the_score_tries_the_function_first_and_then_the_chapter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []

    def failing(ids: list[str], names: list[str]) -> set[str]:
        runs.append(ids)
        finds = {"planted.adapters:function": "test_x[", "planted.adapters:chapter": "test_xy["}
        return {name for name in names if any(finds.get(name, "nothing") in item for item in ids)}

    monkeypatch.setattr(run, "_failing", failing)
    bugs = [
        _bug("own", "test_x[reference-w2-two]"),
        _bug("function", "test_x[reference-w2-one]"),
        _bug("chapter", "test_x[reference.flat-w2-one]"),
        _bug("lives", "test_y[reference-w2-one]"),
    ]
    assert run.living(bugs, KEPT, jobs=1) == [bugs[3]]
    assert runs[0] == ["suites/test_x.py::test_x[planted.adapters:function-w2-two]"]
    assert ["suites/test_x.py::test_xy[planted.adapters:chapter-w2-one]"] in runs[1:]
    assert "by their own item 1, by another of its function 1, of its chapter 1" in capsys.readouterr().out


def test_the_table_of_a_requirement() -> None:
    lines = run.shown(["SHARDING-2"]).splitlines()
    assert lines[:2] == ["SHARDING-2", "  suites/test_sharding.py::test_full_on_every_rank"]
    assert "    replicas-not-averaged: gradient of '" in "\n".join(lines)
    with pytest.raises(SystemExit, match="no case is marked with SHARDING-99"):
        run.shown(["SHARDING-99"])


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('says = "it says so now"', 'says = "it says so"', "it needs 12 characters or more"),
        ('requirement = "X-1"', "", "lacks requirement"),
        ('new = "two"', "", "lacks new"),
        ('id = "a-bug"', 'id = "A bug"', "lower case words with hyphens"),
        ('id = "a-bug"', 'id = "a-bug"\nfound = 1', "found = 1; a row has id, requirement"),
    ],
)
def test_rows_that_are_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, old, new, problem) -> None:
    row = '[[bug]]\nid = "a-bug"\nrequirement = "X-1"\nin = "fsdp_impl.x:y"\nold = "one"\nnew = "two"\n'
    row += 'found_by = "test_x[reference-w2]"\nsays = "it says so now"\n'
    monkeypatch.setattr(table, "HERE", tmp_path)
    (tmp_path / "refused.toml").write_text(row)
    table.read("refused")
    table.read.cache_clear()
    (tmp_path / "refused.toml").write_text(row.replace(old, new))
    with pytest.raises(ValueError, match=rf"planted/refused.toml, .*{re.escape(problem)}"):
        table.read("refused")
