"""Writes docs/seeds.md and suites/standard.toml from docs/seeds.toml; ``--check`` compares instead of writing.

The table lists the seed tests with their combinations of parameters, the cases that replace each of them, and the cases
that replace none. The collected suites give the items of each case and their parameters, from which the page counts the
combinations that are covered. Published run files say how many items ran, and how many had no hardware. Both ways are
checked: the suites have every case of the table, and the table has every case of the suites.

Run as ``python docs/make_seeds.py`` in the repository's root.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import math
import pathlib
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from generating import ROOT, collect, write

sys.path.insert(0, str(ROOT))  # a clone need not be installed

from shardproof.reports.record import Verdict
from shardproof.reports.run import load_run

NAME = "docs/seeds.toml"
TABLE = ROOT / NAME
PAGE = ROOT / "docs/seeds.md"
STANDARD = ROOT / "suites/standard.toml"

PUBLISHED = ROOT / "reports/published"

_HEAD = """\
# From the seeds to the suites

The suites began from five test files of torch, of the middle of 2024: three for `fully_shard`, two for
`FullyShardedDataParallel`. This page says which cases took the place of each of their tests. *Combinations* are those
that the seed's test ran on four devices, within one test and after its skips, compiled and eager runs apart; *covered*
are those for which the suites have an item with these parameters, counted from the collected items. *Items* are pytest
items of one implementation, worlds counted apart, each of which can fail alone. *CPU* and *GPUs* are items of published
runs: those that ran on any implementation, and after the plus sign those that were `unmet` for lack of hardware; the
runs are older than the suites, so that their items may be others than those counted here.

Data differ per data-parallel rank, three steps take the place of ten, and SGD that of Adam, which divides noise by
noise; RESUME and AUTOGRAD-5 use Adam. Outputs, losses, gradients and parameters are compared stage by stage, not the
losses alone, except where a case compares something else: what is registered (REGISTRATION), warnings and errors
(parts of ORDER), the values that sharding begins with (COMPOSITION-8).

Written by `python docs/make_seeds.py` from `docs/seeds.toml`; `tests/test_seeds.py` compares the two.
"""

Items = Mapping[str, Sequence[Mapping[str, Any]]]
"""The items of each case, ``test_file.py::test_function``: the parameters of each item, the size of its world too."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Combinations of a seed's test for which one case should have items: the product of values of parameters.

    Args:
        case: the case, as ``test_file.py::test_function``.
        axes: the values of each parameter of the case, as :func:`plain` returns them. Parameters of the case that are
            missing here may have any value.
    """

    case: str
    axes: Mapping[str, Sequence[Any]]

    @property
    def combinations(self) -> int:
        """The number of combinations, those without items too."""
        return math.prod(len(values) for values in self.axes.values())

    def covered(self, items: Items) -> int:
        """Count the combinations for which the case has an item."""
        found = [{name: plain(value) for name, value in item.items()} for item in items.get(self.case, ())]
        return sum(
            any(
                all(_same(item.get(name), value) for name, value in zip(self.axes, values, strict=True))
                for item in found
            )
            for values in itertools.product(*self.axes.values())
        )


@dataclasses.dataclass(frozen=True)
class Lost:
    """Combinations of a seed's test that no case has.

    Args:
        combinations: how many.
        why: the reason, for the page.
    """

    combinations: int
    why: str


@dataclasses.dataclass(frozen=True)
class SeedTest:
    """One test of the seeds.

    Args:
        cases: the cases that replace the test, as ``test_file.py::test_function``.
        grids: the combinations that cases should cover.
        lost: the combinations that no case covers.
        note: where the meaning changed; empty if nowhere.
    """

    cases: tuple[str, ...]
    grids: tuple[Grid, ...] = ()
    lost: tuple[Lost, ...] = ()
    note: str = ""

    @property
    def combinations(self) -> int:
        """The number of combinations that the test ran, covered or not."""
        return sum(part.combinations for part in (*self.grids, *self.lost))

    def covered(self, items: Items) -> int:
        """Count the combinations for which the suites have an item."""
        return sum(grid.covered(items) for grid in self.grids)


@dataclasses.dataclass(frozen=True)
class Table:
    """The contents of docs/seeds.toml.

    Args:
        seeds: the seed tests of each seed file, ``{file: {test: SeedTest}}``, in the order of the page.
        own: the cases that replace no seed test.
        runs: names of published run files, by the heading of their column.
    """

    seeds: Mapping[str, Mapping[str, SeedTest]]
    own: tuple[str, ...]
    runs: Mapping[str, tuple[str, ...]]

    def places(self) -> Iterator[tuple[str, str]]:
        """Every mention of a case with its place: ``file.py::test`` of a seed test, or ``own``."""
        for case in self.own:
            yield case, "own"
        for name, test in self.tests():
            for case in test.cases:
                yield case, name

    def tests(self) -> Iterator[tuple[str, SeedTest]]:
        """Every seed test with its name, ``file.py::test``."""
        for file, tests in self.seeds.items():
            for name, test in tests.items():
                yield f"{file}::{name}", test


def plain(value: Any) -> Any:
    """Return a parameter's value as TOML has it: tuples become lists, and None becomes the text "None"."""
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return "None" if value is None else value


def _same(found: Any, wanted: Any) -> bool:
    """Compare two plain values; True is not 1."""
    return type(found) is type(wanted) and bool(found == wanted)


def read(path: pathlib.Path = TABLE) -> Table:
    """Read the table.

    Args:
        path: a TOML file.

    Returns:
        The table, whose cases are not yet compared with the suites.

    Raises:
        ValueError: the file is not TOML, has an unknown key, lacks one, or has a value of the wrong type. The message
            is one line that names the key.
    """
    try:
        document = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{NAME} is not TOML: {error}") from None
    own = _cases(document.pop("own", None), f"{NAME}: own")
    runs = document.pop("runs", None)
    if not isinstance(runs, dict):
        raise ValueError(f"{NAME}: runs must be a table of lists of run files, not {runs!r}")
    if unknown := [key for key, tests in document.items() if not (key.endswith(".py") and isinstance(tests, dict))]:
        raise ValueError(f"{NAME}: unknown keys {', '.join(unknown)}: expected own, runs and tables of seed files")
    seeds = {
        file: {name: _seed_test(test, f"{NAME}: {file}::{name}") for name, test in tests.items()}
        for file, tests in document.items()
    }
    return Table(seeds, own, {name: _cases(files, f"{NAME}: runs.{name}") for name, files in runs.items()})


def _seed_test(value: Any, where: str) -> SeedTest:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is an unknown key: expected a table with combinations, cases and note")
    if unknown := value.keys() - {"combinations", "cases", "note"}:
        raise ValueError(f"{where}: unknown keys {', '.join(sorted(unknown))}: expected combinations, cases and note")
    parts, note = value.get("combinations"), value.get("note", "")
    if not (isinstance(parts, list) and all(isinstance(part, dict) for part in parts)):
        raise ValueError(f"{where}: combinations must be a list of tables, not {parts!r}")
    if not isinstance(note, str):
        raise ValueError(f"{where}: note must be a string, not {note!r}")
    grids = tuple(_grid(part, where) for part in parts if "case" in part)
    lost = tuple(_lost(part, where) for part in parts if "case" not in part)
    return SeedTest(_cases(value.get("cases"), f"{where}: cases"), grids, lost, note)


def _grid(part: dict[str, Any], where: str) -> Grid:
    axes = {name: values for name, values in part.items() if name != "case"}
    if wrong := [name for name, values in axes.items() if not isinstance(values, list)]:
        raise ValueError(f"{where}: combinations: {wrong[0]} must be a list of values, not {axes[wrong[0]]!r}")
    return Grid(part["case"], axes)


def _lost(part: dict[str, Any], where: str) -> Lost:
    if part.keys() != {"lost", "why"} or type(part["lost"]) is not int or not isinstance(part["why"], str):
        raise ValueError(f"{where}: combinations: expected a case with lists of values, or lost and why, not {part!r}")
    return Lost(part["lost"], part["why"])


def _cases(value: Any, where: str) -> tuple[str, ...]:
    if not (isinstance(value, list) and all(isinstance(case, str) for case in value)):
        raise ValueError(f"{where} must be a list of strings, not {value!r}")
    return tuple(value)


def problems(table: Table, items: Items) -> list[str]:
    """Compare the cases of the table with those of the suites.

    Args:
        table: what docs/seeds.toml lists.
        items: the items of each case of the suites.

    Returns:
        One line for each disagreement, which names the case and the remedy; none if the two agree.
    """
    lines = []
    places: dict[str, list[str]] = collections.defaultdict(list)
    for case, place in table.places():
        if place in places[case]:
            lines.append(f"{NAME} lists {case} twice in {place}: remove one")
        elif "own" in places[case]:
            lines.append(f"{NAME} lists {case} in own and beside {place}: remove it from one of them")
        places[case].append(place)
    for case in sorted(places.keys() - items.keys()):
        lines.append(f"{NAME} lists {case}, which the suites do not have: correct its name or remove it")
    for case in sorted(items.keys() - places.keys()):
        lines.append(f"{NAME} lacks {case}: add it to the cases of the seed test that it replaces, or to own")
    for name, test in table.tests():
        lines += [line for grid in test.grids for line in _grid_problems(name, test, grid, items)]
    return lines


def _grid_problems(name: str, test: SeedTest, grid: Grid, items: Items) -> Iterator[str]:
    if grid.case not in test.cases:
        yield f"{NAME} has combinations of {grid.case} in {name}: add it to the cases there"
    elif grid.case in items:
        known = {parameter for item in items[grid.case] for parameter in item}
        for unknown in sorted(grid.axes.keys() - known):
            yield f"{NAME} has combinations of {unknown} of {grid.case} in {name}: the case has no such parameter"


class Collector:
    """A plugin of pytest that notes the parameters of the collected items of each case.

    Attributes:
        items: as :data:`Items`.
    """

    def __init__(self) -> None:
        self.items: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Called by pytest."""
        for item in session.items:
            assert isinstance(item, pytest.Function), f"{item.nodeid} is no function"
            parameters = dict(item.callspec.params)
            launch: Any = parameters.pop("rank")
            case = item.nodeid.partition("[")[0].removeprefix("suites/")
            self.items[case].append({"world": launch.size, **parameters})


def collected() -> Items:
    """Collect the suites.

    Returns:
        The items of each case, nightly ones included.

    Raises:
        ValueError: the suites cannot be collected.
    """
    collector = Collector()
    collect(collector)
    return dict(collector.items)


class Outcomes:
    """What became of the items of each case in some run files, over all their implementations.

    Args:
        files: names of published run files.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._verdicts: dict[str, dict[str, set[Verdict]]] = collections.defaultdict(dict)
        for file in files:
            for record in load_run(PUBLISHED / file).cases:
                case = record.id.partition("[")[0].removeprefix("suites/")
                self._verdicts[case].setdefault(record.id, set()).add(record.verdict)

    def show(self, cases: Sequence[str]) -> str:
        """Return the number of items that ran, and of those that did not for lack of hardware, as ``ran + unmet``."""
        found = [verdicts for case in cases for verdicts in self._verdicts.get(case, {}).values()]
        ran = sum(not all(verdict.skipped for verdict in verdicts) for verdicts in found)
        unmet = sum(all(one.skipped for one in verdicts) and Verdict.UNMET in verdicts for verdicts in found)
        return f"{ran} + {unmet}"


def page(table: Table, items: Items) -> str:
    """Write the page.

    Args:
        table: without problems.
        items: the items of each case.

    Returns:
        The page, in Markdown.
    """
    outcomes = {heading: Outcomes(files) for heading, files in table.runs.items()}
    lines = [_HEAD]
    for heading, files in table.runs.items():
        lines.append(f"{heading}: " + ", ".join(f"`reports/published/{file}`" for file in files) + ".")
    lines.append("")
    headings = ["test", "combinations", "covered", "cases", "items", *outcomes, "what changed"]
    for file, tests in table.seeds.items():
        lines += [f"## {file}", "", f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
        for name, test in tests.items():
            cells = [f"`{name}`", test.combinations, test.covered(items)]
            cells += ["<br>".join(f"`{case}`" for case in sorted(test.cases)) or "none yet"]
            cells += [sum(len(items[case]) for case in test.cases)]
            cells += [outcome.show(test.cases) for outcome in outcomes.values()]
            cells += [
                "; ".join(filter(None, [test.note, *(f"{one.combinations} lost: {one.why}" for one in test.lost)]))
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        covered = [test for test in tests.values() if test.cases]
        lines += ["", f"{len(covered)} of {len(tests)} tests, {sum(test.covered(items) for test in covered)} of "
                  f"{sum(test.combinations for test in tests.values())} combinations.", ""]  # fmt: skip
    return "\n".join(lines)


_STANDARD_HEAD = """\
# The combinations of the seed tests, which `--effort standard` always keeps.
# Written by `python docs/make_seeds.py` from `docs/seeds.toml`; `tests/test_seeds.py` compares the two.
"""


def standard(table: Table) -> str:
    """Write the table of combinations that ``--effort standard`` keeps: those that the seed tests ran.

    Args:
        table: without problems.

    Returns:
        The table, in TOML.
    """
    grids = [grid for _, test in table.tests() for grid in test.grids]
    # A case without parameters is always kept.
    entries = [{"case": grid.case, **grid.axes} for grid in grids if grid.axes]
    lines = [["", "[[always]]", *(f"{name} = {_toml(value)}" for name, value in entry.items())] for entry in entries]
    return _STANDARD_HEAD + "\n".join(itertools.chain(*lines)) + "\n"


def _toml(value: Any) -> str:
    """Return a value of docs/seeds.toml as TOML has it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value) if isinstance(value, (bool, str)) else repr(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and the table of the suites, or compare them.

    Args:
        arguments: of the command line; those of the process unless given.

    Returns:
        The exit code: 0, or 1 if the table has problems or a file is out of date.
    """
    parser = argparse.ArgumentParser(description="docs/seeds.md and suites/standard.toml from docs/seeds.toml")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    options = parser.parse_args(arguments)
    try:
        table, items = read(), collected()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if found := problems(table, items):
        print("\n".join(found), file=sys.stderr)
        return 1
    written = {PAGE: page(table, items), STANDARD: standard(table)}
    return write(written, compares=options.check, script="docs/make_seeds.py")


if __name__ == "__main__":
    raise SystemExit(main())
