"""Writes docs/seeds.md from docs/seeds.toml; with ``--check``, compares the page instead of writing it.

The table lists the seed tests, the cases that replace each of them, and the cases that replace none. The collected
suites give the number of items of each case. Both ways are checked: the suites have every case of the table, and the
table has every case of the suites.

Run as ``python docs/make_seeds.py`` in the repository's root.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import io
import pathlib
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NAME = "docs/seeds.toml"
TABLE = ROOT / NAME
PAGE = ROOT / "docs/seeds.md"

_HEAD = """\
# From the seeds to the suites

The suites began from five test files of torch, of the middle of 2024: three for `fully_shard`, two for
`FullyShardedDataParallel`. This page says which cases took the place of each of their tests. *Combinations* are those
that the seed's test ran, within one test and after its skips; *items* are pytest items of one implementation, worlds
counted apart, each of which can fail alone.

Everywhere: gradients and every stage of a step are compared, not the losses alone; each rank has data of its own; three
steps take the place of ten; SGD takes that of Adam, which divides noise by noise.

Written by `python docs/make_seeds.py` from `docs/seeds.toml`; `tests/test_seeds.py` keeps it so.
"""


@dataclasses.dataclass(frozen=True)
class SeedTest:
    """One test of the seeds.

    Args:
        combinations: how many of them the test ran on four devices, after its own skips.
        cases: the cases that replace the test, as ``test_file.py::test_function``.
        note: where the meaning changed; empty if nowhere.
    """

    combinations: int
    cases: tuple[str, ...]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """The contents of docs/seeds.toml.

    Args:
        seeds: the seed tests of each seed file, ``{file: {test: SeedTest}}``, in the order of the page.
        own: the cases that replace no seed test.
    """

    seeds: Mapping[str, Mapping[str, SeedTest]]
    own: tuple[str, ...]

    def places(self) -> Iterator[tuple[str, str]]:
        """Every mention of a case with its place: ``file.py::test`` of a seed test, or ``own``."""
        for case in self.own:
            yield case, "own"
        for file, tests in self.seeds.items():
            for name, test in tests.items():
                for case in test.cases:
                    yield case, f"{file}::{name}"


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
    if unknown := [key for key, tests in document.items() if not (key.endswith(".py") and isinstance(tests, dict))]:
        raise ValueError(f"{NAME}: unknown keys {', '.join(unknown)}: expected own and tables of seed files")
    seeds = {
        file: {name: _seed_test(test, f"{NAME}: {file}::{name}") for name, test in tests.items()}
        for file, tests in document.items()
    }
    return Table(seeds, own)


def _seed_test(value: Any, where: str) -> SeedTest:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is an unknown key: expected a table with combinations, cases and note")
    if unknown := value.keys() - {"combinations", "cases", "note"}:
        raise ValueError(f"{where}: unknown keys {', '.join(sorted(unknown))}: expected combinations, cases and note")
    combinations, note = value.get("combinations"), value.get("note", "")
    if type(combinations) is not int:
        raise ValueError(f"{where}: combinations must be an integer, not {combinations!r}")
    if not isinstance(note, str):
        raise ValueError(f"{where}: note must be a string, not {note!r}")
    return SeedTest(combinations, _cases(value.get("cases"), f"{where}: cases"), note)


def _cases(value: Any, where: str) -> tuple[str, ...]:
    if not (isinstance(value, list) and all(isinstance(case, str) for case in value)):
        raise ValueError(f"{where} must be a list of strings, not {value!r}")
    return tuple(value)


def problems(table: Table, items: Mapping[str, int]) -> list[str]:
    """Compare the cases of the table with those of the suites.

    Args:
        table: what docs/seeds.toml lists.
        items: the number of pytest items of each case of the suites.

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
    return lines


class Collector:
    """A plugin of pytest that counts the collected items of each case.

    Attributes:
        items: ``{test_file.py::test_function: items}``.
    """

    def __init__(self) -> None:
        self.items: collections.Counter[str] = collections.Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Called by pytest."""
        self.items.update(item.nodeid.partition("[")[0].removeprefix("suites/") for item in session.items)


def collected() -> Mapping[str, int]:
    """Collect the suites.

    Returns:
        The number of items of each case, nightly ones included.

    Raises:
        ValueError: the suites cannot be collected.
    """
    collector = Collector()
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "nightly or not nightly", str(ROOT / "suites")]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(arguments, plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise ValueError(f"the suites cannot be collected:\n{output.getvalue()}")
    return collector.items


def page(table: Table, items: Mapping[str, int]) -> str:
    """Write the page.

    Args:
        table: without problems.
        items: the number of items of each case.

    Returns:
        The page, in Markdown.
    """
    lines = [_HEAD]
    for file, tests in table.seeds.items():
        lines += [f"## {file}", "", "| test | combinations | cases | items | what changed |", "|---|---|---|---|---|"]
        for name, test in tests.items():
            cases = "<br>".join(f"`{case}`" for case in sorted(test.cases)) or "none yet"
            total = sum(items[case] for case in test.cases)
            lines.append(f"| `{name}` | {test.combinations} | {cases} | {total} | {test.note} |")
        covered = [test for test in tests.values() if test.cases]
        lines += ["", f"{len(covered)} of {len(tests)} tests, {sum(test.combinations for test in covered)} of "
                  f"{sum(test.combinations for test in tests.values())} combinations.", ""]  # fmt: skip
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or compare it.

    Args:
        arguments: of the command line; those of the process unless given.

    Returns:
        The exit code: 0, or 1 if the table has problems or the page is out of date.
    """
    parser = argparse.ArgumentParser(description="docs/seeds.md from docs/seeds.toml")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of date")
    options = parser.parse_args(arguments)
    try:
        table, items = read(), collected()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if found := problems(table, items):
        print("\n".join(found), file=sys.stderr)
        return 1
    text = page(table, items)
    if not options.check:
        PAGE.write_text(text)
        return 0
    if PAGE.is_file() and PAGE.read_text() == text:
        return 0
    print("docs/seeds.md is out of date: run python docs/make_seeds.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
