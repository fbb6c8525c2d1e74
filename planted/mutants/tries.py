"""Runs the items that cover each of some mutants: a plugin of a pytest that collects the suites and runs no test.

    python -m pytest suites --impl ... -p planted.mutants.tries        with the two variables of the environment

The items are collected once. For each mutant, its items run in ranks of their own until one of them finds it. An item
that fails runs once more in ranks without a mutant, once in the whole run: one that does not pass there finds nothing.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import pytest

from planted.mutants import plant, rules
from planted.mutants.rules import Mutant
from shardproof.harness.plugin import cases, changed, drawing
from shardproof.harness.plugin.records import MadeRecord
from shardproof.harness.plugin.state import STATE, State
from shardproof.harness.worlds import instruments
from shardproof.harness.worlds.pool import Pool
from shardproof.runfile import Verdict

#: The environment variable with the file of a :class:`TrySettings`.
VARIABLE = "SHARDPROOF_MUTANTS"

#: A case that may take longer does not run: a call must end.
_LONGEST = 60.0
#: Seconds after the time limit in which each process ends, or is killed.
GRACE = 50.0

_PASSING = (Verdict.PASS, Verdict.EXPECTED_FAIL)


@dataclasses.dataclass(frozen=True)
class Before:
    """What earlier calls have run of a mutant.

    Attributes:
        ran: the items of this effort.
        reached: how many of these came to it.
        others: the items of other efforts, which do not run again.
    """

    ran: list[str]
    reached: int
    others: list[str]


@dataclasses.dataclass(frozen=True)
class TrySettings:
    """What the processes of one call have in common.

    Attributes:
        results: the file to which each appends a line for each mutant.
        claims: the folder in which each leaves a file with the id of a mutant before it begins with it.
        map: the map of items to functions.
        lines: the items that come to a line, by module and line (``coverage.LINES``); {} if they are not known.
        effort: the effort whose items run.
        items: the number of items that run with a mutant, as :func:`is_enough` counts.
        implementations: by group, those whose items run.
        until: the time, of ``time.time``, after which no item begins.
        torch: its version.
        mutants: of each, its group, the mutant, and the fields of its :class:`Before`.
        unsound: items that do not pass without a mutant.
        terminal: the file descriptor to which each writes its results.
    """

    results: str
    claims: str
    map: str
    lines: dict[str, dict[str, list[str]]]
    effort: str
    items: int
    implementations: dict[str, list[str]]
    until: float
    torch: str
    mutants: list[tuple[str, dict[str, Any], dict[str, Any]]]
    unsound: list[str]
    terminal: int


def is_enough(ran: int, reached: int, *, items: int, covering: int) -> bool:
    """Whether so many items have come to the changed statement, or three times as many have run, or all."""
    return reached >= items or ran >= min(3 * items, covering)


def append(results: pathlib.Path, line: dict[str, Any]) -> None:
    """Append a line to a file that other processes append to."""
    with results.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line) + "\n")


def alternating(comers: Iterable[str], items: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Items in their order, those that came to the line of a mutant in turn with those of which it is not known.

    To a line that is seldom passed only the first kind comes. To one that each call passes come all, and then the first
    kind is what each process ran first: the same few chapters for each mutant.
    """
    known = set(comers)
    return changed.in_turn([[item for item in items if (item.nodeid in known) is kind] for kind in (True, False)])


def may_run(item: pytest.Item, state: State) -> TypeGuard[pytest.Function]:
    """Whether an item is a case that runs here, for a bounded time, beside others, and always the same."""
    if not cases.is_case(item) or cases.missing(item, state.selection) is not None:
        return False
    is_short = _deadline(item, state) <= _LONGEST
    return is_short and drawing.drawn_parameter(item) is None and item.get_closest_marker("alone") is None


def _deadline(item: pytest.Item, state: State) -> float:
    mark = item.get_closest_marker("deadline")
    return float(mark.args[0]) if mark is not None else state.selection.deadline


class _Worlds:
    """Ranks with a mutant, and ranks without one."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._folder = pathlib.Path(os.environ[instruments.FOLDER])
        self._sound, self._planted = Pool(), Pool()

    @contextlib.contextmanager
    def planted(self, packed: bytes) -> Iterator[None]:
        """Have a mutant in the ranks that begin to run in the block."""
        self._packed = packed
        try:
            yield
        finally:
            self._planted.close()

    def with_mutant(self, item: pytest.Function) -> tuple[MadeRecord, bool]:
        """Run an item with the mutant; whether a rank came to the changed statement comes second."""
        file, reached = self._folder / plant.FILE, self._folder / plant.REACHED
        reached.unlink(missing_ok=True)
        file.write_bytes(self._packed)
        try:
            made = self._run(item, self._planted)
        finally:
            file.unlink()
        return made, reached.exists()

    def without(self, item: pytest.Function) -> MadeRecord:
        """Run an item of the sound implementation."""
        return self._run(item, self._sound)

    def _run(self, item: pytest.Function, pool: Pool) -> MadeRecord:
        made = cases.run(item, pool, self._state.selection, numbers=self._state.numbers)
        self._state.known_failures.judge(item, made)
        return made

    def close(self) -> None:
        """Stop all ranks."""
        self._sound.close()
        self._planted.close()


class Tries:
    """Runs the mutants of the settings until their time is over."""

    def __init__(self, settings: TrySettings, state: State, items: Sequence[pytest.Item]) -> None:
        self._settings, self._state = settings, state
        usable = [item for item in items if may_run(item, state)]
        self._items = {
            group: [item for item in usable if cases.launch_of(item).implementation in names]
            for group, names in settings.implementations.items()
        }
        self._known = changed.read(pathlib.Path(settings.map))
        self._worlds = _Worlds(state)
        self._sound: dict[str, bool] = dict.fromkeys(settings.unsound, False)
        self._results = pathlib.Path(settings.results)

    @property
    def _is_over(self) -> bool:
        return time.time() >= self._settings.until

    def _is_late(self, item: pytest.Function) -> bool:
        """Whether a run of an item, with a mutant and without, may not end in time."""
        longest = 2 * _deadline(item, self._state)
        return self._is_over or time.time() + longest > self._settings.until + GRACE

    def run(self) -> None:
        """Run each mutant that no other process has claimed."""
        try:
            for group, fields, before in self._settings.mutants:
                mutant = Mutant(**fields)
                if self._is_over:
                    break
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(pathlib.Path(self._settings.claims, mutant.id), os.O_CREAT | os.O_EXCL))
                    line = self._line(group, mutant, Before(**before))
                    append(self._results, line)
                    os.write(self._settings.terminal, f"{said(line)}\n".encode())
        finally:
            self._worlds.close()

    def _line(self, group: str, mutant: Mutant, before: Before) -> dict[str, Any]:
        started = time.time()
        packed = packed_of(mutant)
        comers = self._settings.lines.get(mutant.module, {}).get(str(mutant.line), ())
        change = changed.Change(functions=frozenset({mutant.place}))
        callers = alternating(comers, changed.ordered(self._items[group], change, self._known))
        todo = [item for item in callers if self._sound.get(item.nodeid, True) and item.nodeid not in before.others]
        ran, reached, found = list[str](), 0, dict[str, str]()
        with self._worlds.planted(packed):
            for item in todo:
                if item.nodeid in before.ran:
                    continue
                counts = len(before.ran) + len(ran), before.reached + reached
                if self._is_late(item) or is_enough(*counts, items=self._settings.items, covering=len(todo)):
                    break
                made, has_reached = self._worlds.with_mutant(item)
                if made.verdict == Verdict.HARNESS_ERROR:  # of the machine, perhaps
                    made, has_reached = self._worlds.with_mutant(item)
                if made.verdict.fails:
                    if not self._is_sound(item):
                        continue
                    found = {"found_by": item.nodeid, "says": f"{made.verdict}: {_reason(made.text)}"}
                ran.append(item.nodeid)
                reached += has_reached
                if found:
                    break
        covering = sum(self._sound.get(item.nodeid, True) for item in todo)
        return {
            "id": mutant.id, "group": group, "torch": self._settings.torch, **dataclasses.asdict(mutant),
            "effort": self._settings.effort, "ran": ran, "reached": reached, "covering": covering,
            "seconds": round(time.time() - started, 1), **found,
        }  # fmt: skip

    def _is_sound(self, item: pytest.Function) -> bool:
        """Whether an item passes without a mutant; one that does not is noted for the processes of later calls."""
        if item.nodeid not in self._sound:
            made = self._worlds.without(item)
            self._sound[item.nodeid] = made.verdict in _PASSING
            if not self._sound[item.nodeid]:
                append(self._results, {"unsound": item.nodeid, "torch": self._settings.torch, "verdict": made.verdict})
        return self._sound[item.nodeid]


def _reason(text: str) -> str:
    """The first error that a text names, or else its first line that says more than which ranks."""
    lines = [line.strip() for line in text.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return next((line[:160] for line in [*errors, *lines] if line and not line.endswith(":")), "")


def packed_of(mutant: Mutant) -> bytes:
    """What ranks plant; ValueError if they cannot."""
    path = rules.path_of(mutant.module)
    assert path is not None, f"{mutant.module} has no file"
    source = rules.source_of(path)
    return plant.compiled(source, rules.definitions(source)[mutant.place.partition(":")[2]], mutant, path)


def said(line: dict[str, Any]) -> str:
    """A result in one line."""
    what = "found by " + line["found_by"].partition("::")[2] if line.get("found_by") else "not found"
    name = line["place"].partition(":")[2]
    return f"{line['group']} {name} {line['rule']}: {what} ({len(line['ran'])} items, {line['seconds']} s)"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Called by pytest; runs the mutants in place of the items."""
    settings = TrySettings(**json.loads(pathlib.Path(os.environ[VARIABLE]).read_text()))
    Tries(settings, session.config.stash[STATE], session.items).run()
    return True
