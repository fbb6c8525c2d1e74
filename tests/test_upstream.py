"""The fixes that planted/upstream undoes: each edit fits the installed package, and the disk keeps its own."""

import dataclasses
import importlib.util
import pathlib
import tomllib

import pytest

from planted.upstream import __main__ as upstream
from planted.upstream import edit
from tests.harness.inner import python

ROWS = {row.id: row for row in upstream.rows()}


@pytest.mark.parametrize("name", ROWS)
def test_the_edit_can_be_made(name: str) -> None:
    reason = dataclasses.replace(ROWS[name], gpu=False, unseen="").skipped()
    if reason:
        pytest.skip(reason)
    assert ROWS[name].edited()


def test_rows_that_cannot_run_here_say_so() -> None:
    row = ROWS["88955"]
    assert dataclasses.replace(row, torch="<2.0").skipped().startswith("needs torch<2.0, not 2.")
    assert dataclasses.replace(row, gpu=True).skipped() == "needs a GPU"
    assert dataclasses.replace(row, gpu=True).skipped("cuda") == ""
    assert dataclasses.replace(row, place="missing.module:f").skipped() == "needs missing"


@pytest.mark.parametrize("old", ["missing", "0"])
def test_a_text_that_occurs_another_number_of_times_is_refused(old: str) -> None:
    with pytest.raises(ValueError, match="times instead of once"):
        edit.edited("def f():\n    return 0 + 0\n", "f", old, "1")


def test_no_pull_request_is_both_a_row_and_dropped() -> None:
    dropped = tomllib.loads((upstream.HERE / "dropped.toml").read_text())["dropped"]
    others = {(one.get("package", "torch"), one["pr"]) for one in dropped}
    assert {package for package, _ in others} == set(upstream.REPOSITORIES)
    assert not {(row.package, row.pr) for row in ROWS.values()} & others


@pytest.mark.nightly
def test_a_process_has_the_bug_and_the_disk_has_not() -> None:
    row = ROWS["77195"]
    module, _, function = row.place.partition(":")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    file = pathlib.Path(spec.origin).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    files = [file, *file.parent.glob(f"__pycache__/{file.stem}.*")]
    before = [one.read_bytes() for one in files]
    script = f"import {module} as m; print('current_order_index' in m.{function}.__code__.co_names)"
    for environment, has in (({}, "True"), (row.environment, "False")):
        done = python("-c", script, **environment)
        assert done.stdout.strip() == has, done.stderr
    assert [one.read_bytes() for one in files] == before


def test_the_page_has_every_row() -> None:
    lines = upstream.page().splitlines()
    assert [line.split("](")[0] for line in lines if line.startswith("| [")] == [f"| [{name}" for name in ROWS]
