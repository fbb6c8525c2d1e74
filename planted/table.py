"""Reads the tables of planted bugs, and makes the edits that they describe.

The tables prove the suites: a row of ``<chapter>.toml`` is a bug of the reference implementation, and the item of the
chapter's cases that finds it (:class:`Bug` has the keys). ``adapters.py`` has the implementations with a bug, which
``--impl`` takes, ``watched.py`` those with the doctor attached, and ``run.py`` runs the items of rows and judges what
they say. ``tests/test_planted.py`` has a test for each row.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import pathlib
import re
import textwrap
import tomllib
import zlib
from typing import Any

from shardproof.harness.adapters.capability import EVERY, why_not

HERE = pathlib.Path(__file__).parent
SUITES = HERE.parent / "suites"
#: The module of bugs that are no edit.
WRITTEN = "planted.adapters"
#: Shorter words are in too many messages to be a reason.
MIN_SAYS = 12
#: What an item must not say when something else is broken at the place of a bug.
ELSEWHERE = "planted elsewhere"
#: Begins the name of the adapter that raises it.
RAISES = "elsewhere_"
#: Begins the name of the adapter that ignores a capability.
WITHOUT = "without_"

#: The module of implementations with the doctor attached.
WATCHING = "planted.watched"
#: The chapters whose items it watches.
WATCHED = ("training", "accumulation", "hybrid")
#: What an item says that fails because of the doctor.
UNHEALTHY = "Unhealthy: step"

_KEYS = {
    "id": str, "requirement": str, "in": str, "old": str, "new": str, "found_by": str, "says": (str, list),
    "ranks": str, "gpus": int, "simulate": int, "ignores": str,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Bug:
    """A row of a table."""

    id: str  # lower case words with hyphens, once in all tables
    requirement: str  # the id of the requirement that the bug breaks, of the contract mark of its item
    # The key ``in``. The function that is edited, as "fsdp_impl.module:name" or "fsdp_impl.module:Class.name"; of a bug
    # that is no edit, its adapter, as "planted.adapters:Class".
    place: str
    old: str | None  # a text that the function's source has once; None for a bug that is no edit
    new: str | None
    item: str  # the key ``found_by``. The node id of the item that finds the bug, of the implementation without it.
    # Texts that the failure of the item contains: the stage, the parameter, the collective or the message.
    says: tuple[str, ...]
    own_ranks: bool = False  # the key ``ranks = "own"``: what the bug does depends on what its ranks ran before
    gpus: int = 0  # how many GPUs it needs; 0 for a CPU
    simulate: int = 0  # the size of the simulated world in which its item runs; 0 for real ranks
    # The capability that is declared and that the bug amounts to ignoring; empty for none. The name of an adapter
    # "without_<capability>" says it too.
    ignores: str = ""

    @property
    def implementation(self) -> str:
        """The implementation without the bug, as of ``--impl``."""
        return self.item.partition("[")[2].partition("-")[0]

    @property
    def case(self) -> str:
        """The case of the item, as "suites/test_x.py::test_y"."""
        return self.item.partition("[")[0]

    @property
    def file(self) -> str:
        """The file of the case."""
        return self.item.partition("::")[0]

    @property
    def name(self) -> str:
        """The implementation with the bug, as of ``--impl``."""
        return self.place if self.old is None else f"{WRITTEN}:{self.id.replace('-', '_')}"

    @property
    def is_by_day(self) -> bool:
        """Whether it is planted by day: a fixed eightieth, which no other bug changes."""
        return zlib.crc32(self.id.encode()) % 80 == 0

    def with_bug(self, item: str) -> str:
        """The node id of an item with the bug, for that of its implementation."""
        return item.replace(f"[{self.implementation}-", f"[{self.name}-")

    def edited(self) -> Any:
        """The function after the edit; ValueError if its source does not have the old text exactly once."""
        assert self.old is not None and self.new is not None
        source = self._source()
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.id}: {self.place} has {self.old!r} {count} times instead of once")
        return self._compiled(source.replace(self.old, self.new))

    def raising(self) -> Any:
        """The function with an error of its own as its first statement."""
        tree = ast.parse(self._source())
        (function,) = tree.body
        assert isinstance(function, ast.FunctionDef)
        function.body.insert(0, ast.parse(f"raise RuntimeError({ELSEWHERE!r})").body[0])
        return self._compiled(ast.unparse(ast.fix_missing_locations(tree)))

    def owner(self) -> tuple[Any, str]:
        """The module or class that has the function, and its name there."""
        module_name, _, path = self.place.partition(":")
        owner: Any = importlib.import_module(module_name)
        *classes, name = path.split(".")
        for part in classes:
            owner = getattr(owner, part)
        return owner, name

    def _function(self) -> Any:
        owner, name = self.owner()
        return inspect.unwrap(getattr(owner, name))

    def _source(self) -> str:
        return textwrap.dedent(inspect.getsource(self._function()))

    def _compiled(self, source: str) -> Any:
        made: dict[str, Any] = {}
        # Outside of its class, super() finds none.
        source = source.replace("super()", f"super({self.owner()[0].__name__}, self)")
        code = compile(source, f"{self.place} (edited)", "exec", dont_inherit=True)
        exec(code, self._function().__globals__, made)
        return made[self.owner()[1]]


@functools.cache
def read(chapter: str) -> dict[str, Bug]:
    """The bugs of a chapter's table, ``<chapter>.toml``, by their ids; a ValueError names a row of another form."""
    rows = tomllib.loads((HERE / f"{chapter}.toml").read_text())["bug"]
    bugs = [_bug(row, chapter) for row in rows]
    if twice := sorted({bug.id for bug in bugs if [one.id for one in bugs].count(bug.id) > 1}):
        raise ValueError(f"planted/{chapter}.toml has {', '.join(twice)} more than once")
    return {bug.id: bug for bug in bugs}


def replaced(bug: Bug) -> Bug:
    """The row with an error of its own at the place of the bug, instead of the bug (``adapters`` has both)."""
    module, _, name = bug.name.partition(":")
    return dataclasses.replace(bug, place=f"{module}:{RAISES}{name}", old=None, new=None)


def watched(bug: Bug) -> Bug:
    """The row with the doctor attached to the implementation with the bug."""
    return dataclasses.replace(bug, place=f"{WATCHING}:{bug.name.partition(':')[2]}", old=None, new=None)


def chapters() -> list[str]:
    """The names of the tables."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def every() -> dict[str, Bug]:
    """All bugs by their ids; ValueError if a row is wrong, or an id stands in two tables."""
    found: dict[str, Bug] = {}
    for chapter in chapters():
        if twice := sorted(found.keys() & read(chapter).keys()):
            raise ValueError(f"planted/{chapter}.toml has ids that stand in another table too: {', '.join(twice)}")
        found |= read(chapter)
    return found


def find(bug: str) -> Bug | None:
    """The bug of an id, without parsing the other tables: ranks need one of them."""
    for chapter in chapters():
        if f'\nid = "{bug}"\n' in (HERE / f"{chapter}.toml").read_text():
            return read(chapter)[bug]
    return None


def contract_marks() -> dict[str, list[str]]:
    """By case of the suites, as "suites/test_x.py::test_y", the requirements that its mark names."""
    marks = {}
    for path in sorted(SUITES.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                calls = [one for one in node.decorator_list if isinstance(one, ast.Call)]
                found = [arg for one in calls if ast.unparse(one.func) == "contract" for arg in one.args]
                marks[f"{path.relative_to(SUITES.parent)}::{node.name}"] = [ast.literal_eval(arg) for arg in found]
    return marks


def ignored_by(adapter: str) -> str:
    """The capability, or option, that an adapter ignores by the name of its class.

    Raises:
        ValueError: there is none of this name.
    """
    wanted = adapter.removeprefix(WITHOUT)
    for one in EVERY:
        if wanted == re.sub(r"[-.]", "_", one):
            return str(one)
    raise ValueError(f"{adapter}: {why_not(wanted.replace('_', '-'))}")


def _ignored(place: str) -> str:
    start = f"{WRITTEN}:{WITHOUT}"
    return ignored_by(place.removeprefix(f"{WRITTEN}:")) if place.startswith(start) else ""


def _bug(row: dict[str, Any], chapter: str) -> Bug:
    where = f"planted/{chapter}.toml, {row.get('id', 'a row without an id')}"
    for key, value in row.items():
        if key not in _KEYS or not isinstance(value, _KEYS[key]):
            raise ValueError(f"{where}: {key} = {value!r}; a row has {', '.join(_KEYS)}")
    is_edit = not row.get("in", "").startswith(f"{WRITTEN}:")
    needed = ["id", "requirement", "in", "found_by", "says", *(["old", "new"] if is_edit else [])]
    if missing := [key for key in needed if key not in row]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row["id"]):
        raise ValueError(f"{where}: an id is lower case words with hyphens")
    says = [row["says"]] if isinstance(row["says"], str) else row["says"]
    if not says or max(len(text.strip()) for text in says) < MIN_SAYS:
        raise ValueError(f"{where}: says = {row['says']!r}; it needs {MIN_SAYS} characters or more")
    if row.get("ranks", "own") != "own":
        raise ValueError(f'{where}: ranks = {row["ranks"]!r}; it is "own", or left out')
    return Bug(
        id=row["id"], requirement=row["requirement"], place=row["in"], old=row.get("old"), new=row.get("new"),
        item=f"suites/test_{chapter}.py::{row['found_by']}", says=tuple(says), own_ranks="ranks" in row,
        gpus=row.get("gpus", 0), simulate=row.get("simulate", 0), ignores=row.get("ignores", _ignored(row["in"])),
    )  # fmt: skip
