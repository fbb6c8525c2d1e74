"""``python -m benchmarks sweep``: the changes that it makes, how live code takes them, and what it says of them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from expecttest import assert_expected_inline

ROOT = pathlib.Path(__file__).parents[1]

SOURCE = '''\
import contextlib, functools

def kept(items, *, limit=3):
    """Not changed."""
    if limit and len(items) < limit:
        raise ValueError(f"{limit + 1}")
    for item in items:
        items[0] += 1
    return sorted(items)[:limit]

class Box:
    def full(self) -> bool:
        return self.size > 0

    @property
    def size(self):
        return helper(self, deep=True)

    @contextlib.contextmanager
    def held(self):
        yield self.size if self else 0

def maker(base):
    def add(x):
        return base + x
    return add

def helper(box, deep):
    with contextlib.suppress(KeyError):
        return 2 if deep else 1

@functools.lru_cache
def cached(x):
    return x * 2

add_two = maker(2)
'''

CASE = """
import pytest
from sample.parts import kept, helper
from shardproof.testing import world

@world(2)
def test_kept(rank):
    assert kept([9, 3, 1, 2], limit=4) == [1, 2, 3, 13]

@world(2)
@pytest.mark.parametrize("deep", [True])
def test_helper(rank, deep):
    assert helper(None, deep) == 2
"""


@pytest.fixture
def sample(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package with the sources above, imported."""
    folder = tmp_path / "sample"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "parts.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("sample", "sample.parts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("sample.parts")


def folder_of(module: ModuleType) -> pathlib.Path:
    assert module.__file__ is not None
    return pathlib.Path(module.__file__).parent


def test_changes_of_a_source(sample: ModuleType) -> None:
    from sweeping import changes

    source = SOURCE.encode()
    found = [
        f"{change.name.removeprefix('parts.py:')} {change.kind}: "
        f"{source[change.start : change.end].decode()} -> {change.new or '(nothing)'}"
        for change in changes.changes_of(folder_of(sample))
    ]
    assert_expected_inline(
        "\n".join(found),
        """\
5:1 never: limit and len(items) < limit -> False
5:2 always: limit and len(items) < limit -> True
5:3 other connective: limit and len(items) < limit -> (limit or len(items) < limit)
5:4 missing operand: limit and len(items) < limit -> (len(items) < limit)
5:5 missing operand: limit and len(items) < limit -> (limit)
5:6 other comparison: len(items) < limit -> len(items) <= limit
6:1 missing raise: raise ValueError(f"{limit + 1}") -> pass
7:1 without the first: items -> list(items)[1:]
7:2 without the last: items -> list(items)[:-1]
7:3 backwards: items -> list(items)[::-1]
8:1 missing assignment: items[0] += 1 -> pass
8:2 replaced, not added: items[0] += 1 -> items[0] = 1
8:3 off by one: 1 -> 2
9:1 returns nothing: return sorted(items)[:limit] -> return None
9:2 not converted: sorted(items) -> (items)
9:3 missing bound: limit -> (nothing)
13:1 opposite: self.size > 0 -> not (self.size > 0)
13:2 other comparison: self.size > 0 -> self.size >= 0
13:3 off by one: 0 -> 1
17:1 returns nothing: return helper(self, deep=True) -> return None
17:2 without deep: (self, deep=True) -> (self)
17:3 opposite: True -> False
21:1 always: self.size if self else 0 -> (self.size)
21:2 never: self.size if self else 0 -> (0)
21:3 off by one: 0 -> 1
25:1 returns nothing: return base + x -> return None
25:2 other arithmetic: base + x -> base - x
26:1 returns nothing: return add -> return None
29:1 missing context: with contextlib.suppress(KeyError) -> if True
30:1 returns nothing: return 2 if deep else 1 -> return None
30:2 always: 2 if deep else 1 -> (2)
30:3 never: 2 if deep else 1 -> (1)
30:4 off by one: 2 -> 3
30:5 off by one: 1 -> 2
34:1 returns nothing: return x * 2 -> return None
34:2 other arithmetic: x * 2 -> x // 2
34:3 off by one: 2 -> 3""",
    )


# What changes, in which function, and what a changed call answers.
LIVE: dict[str, tuple[str, str, Callable[[Any], Any], Any]] = {
    "function": ("missing bound", "kept", lambda parts: parts.kept([9, 3, 1, 2]), [1, 2, 3, 13]),
    "method": ("opposite", "Box.full", lambda parts: parts.Box().full(), False),
    "property": ("opposite", "Box.size", lambda parts: parts.Box().size, 1),
    "wrapped": ("never", "Box.held", lambda parts: contextlib.ExitStack().enter_context(parts.Box().held()), 0),
    "closure": ("other arithmetic", "maker", lambda parts: parts.add_two(1), 1),
    "cached": ("other arithmetic", "cached", lambda parts: parts.cached.__wrapped__(5), 2),
}


@pytest.mark.parametrize("what", LIVE)
def test_live_code_is_changed_and_put_back(sample: ModuleType, what: str) -> None:
    from sweeping import changes, live

    kind, function, call, answer = LIVE[what]
    folder = folder_of(sample)
    change = next(each for each in changes.changes_of(folder) if (each.kind, each.function) == (kind, function))
    sound = call(sample)
    undo = live.apply(change, folder)
    changed = call(sample)
    live.take_back(undo)
    assert (changed, call(sample), undo) == (answer, sound, [])
    assert changed != sound


def test_code_that_nothing_holds(sample: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from sweeping import changes, live

    change = next(each for each in changes.changes_of(folder_of(sample)) if each.function == "helper")
    monkeypatch.delattr(sample, "helper")
    assert live.apply(change, folder_of(sample)) == []


def written(sample: ModuleType, **keys: Any) -> list[Any]:
    """The changes of a table with one row, as they are read."""
    from sweeping.written import read_changes

    folder = folder_of(sample)
    path = folder.parent / "changes.toml"
    path.write_text("[[bug]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    return read_changes(path, folder)


def test_written_changes(sample: ModuleType) -> None:
    """Of what is written only the part that differs is changed, and what executes its statement is to run."""
    old = "def held(self):\n    yield self.size if self else 0\n"
    keys = {"id": "h-1", "in": "sample.parts:Box.held", "says": "left alone"}
    (change,) = written(sample, **keys, old=old, new=old.replace("self else", "not self else"))
    assert (change.name, change.kind, change.new, change.first, change.last) == ("h-1", "planted", "not ", 21, 21)
    assert change.applied(SOURCE.encode()).decode() == SOURCE.replace("if self else", "if not self else")


UNFIT = {
    "elsewhere": ({"in": "other.parts:kept"}, "there is no module other.parts below"),
    "no-function": ({"in": "sample.parts:keep"}, "sample.parts has no function keep"),
    "twice": ({"old": "limit"}, "`old` occurs 5 times in sample.parts:kept, not once"),
    "without-a-text": ({"new": 3}, "new must be there, as text"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_written_changes_that_do_not_fit(sample: ModuleType, what: str) -> None:
    keys = {"id": "h-1", "in": "sample.parts:kept", "old": "limit=3", "new": "limit=4"}
    keys_, message = UNFIT[what]
    with pytest.raises(ValueError, match="row 1: ") as caught:
        written(sample, **keys | keys_)
    assert message in str(caught.value)


def test_a_found_change_becomes_a_row_that_can_be_read(sample: ModuleType, tmp_path: pathlib.Path) -> None:
    from sweeping.changes import changes_of
    from sweeping.written import read_changes, rows_of

    folder = folder_of(sample)
    changes = {change.name: change for change in changes_of(folder)}
    item = "suites/test_inputs.py::test_batch_without_rows[reference-w2]"
    path = tmp_path / "rows.toml"
    path.write_text(rows_of(changes, dict.fromkeys(changes, (item, "fail:\nit says what is wrong\n")), folder))
    source = SOURCE.encode()
    again = read_changes(path, folder)
    assert [one.applied(source) for one in again] == [one.applied(source) for one in changes.values()]
    assert 'requirement = "INPUTS-5"' in path.read_text()
    assert 'says = "it says what is wrong"' in path.read_text()


def test_items_that_another_selection_left_out_are_met_later(sample: ModuleType) -> None:
    sweep = importlib.import_module("sweep")
    results = {"lives": sweep.Result("lives", frozenset({"b"}), None, ""), "met": sweep.Result("found", {"a"}, "a", "")}
    todo = sweep.order(
        ["lives", "met", "new"], {name: ["a", "b", "c", "d"] for name in ("lives", "met", "new")}, results, 2
    )
    assert todo == [("new", ["a", "b"]), ("lives", ["a", "c"])]


@pytest.mark.nightly
def test_a_sweep_goes_on_where_it_ended(sample: ModuleType, tmp_path: pathlib.Path) -> None:
    case = tmp_path / "test_sample.py"
    case.write_text(CASE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks", "sweep", tmp_path / "sweep", "--sources", folder_of(sample)]
    command += ["--impl", "ddp", "--items", "1", case]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)

    done = run("--seconds", "0")
    assert done.stdout.startswith("37 changes: 0 found, 0 live, 15 that no item executes"), done.stderr
    done = run()
    assert_expected_inline(
        done.stdout.partition("\n\n")[0],
        """37 changes: 14 found, 8 live, 15 that no item executes, 0 that could not be made, 0 not run""",
    )
    lives = done.stdout[done.stdout.index("parts.py:26:1") :]
    assert_expected_inline(
        lives.partition("\n\nparts.py:34")[0],
        """\
parts.py:26:1  returns nothing, in maker: lives through 1 of 2 items
  - return add
  + return None

parts.py:29:1  missing context, in helper: lives through 1 of 1 items
  - with contextlib.suppress(KeyError)
  + if True

parts.py:30:2  always, in helper: lives through 1 of 1 items
  - 2 if deep else 1
  + (2)

parts.py:30:5  off by one, in helper: lives through 1 of 1 items
  - 1
  + 2""",
    )
    refused = run("--only", "parts.py:1:1")
    assert refused.stderr == "--only parts.py:1:1: no such change; a name is FILE:LINE:NUMBER, or an id of --changes\n"
    again = run("--only", "parts.py:5:4")
    assert again.stdout == done.stdout
    changes = tmp_path / "changes.toml"
    row = '[[bug]]\nid = "h-1"\nin = "sample.parts:helper"\nold = "2 if deep"\nnew = "3 if deep"\n'
    changes.write_text(row)
    assert run("--changes", str(changes)).stdout.startswith("1 changes: 1 found, 0 live, 0 that no item executes")
    changes.write_text("")
    assert (
        run("--changes", str(changes)).stderr == f"--changes {changes} is no table of planted bugs: KeyError('bug')\n"
    )
    (folder_of(sample) / "parts.py").write_text(SOURCE + "\n")
    assert "was made with other sources" in run().stderr
