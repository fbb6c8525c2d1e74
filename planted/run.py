"""Runs the items that find planted bugs, judges what they say, and counts what a shorter run of the suites finds.

    python -m planted.run table [REQUIREMENT ...]
    python -m planted.run score [--effort quick] [--jobs 2] [--at-least SHARE]

``table`` prints, for each requirement, the cases that check it, the bugs that they find, and what they say. ``score``
counts the bugs that an effort finds. It may leave out the item that finds a bug: then the items of the same function
that it keeps are run, and where they pass, those of the chapter. It leaves out bugs of GPUs, of simulated worlds and of
drawn cases.

A run of pytest with ``-p planted.run`` collects the items on its command line alone: each function would otherwise
become as many items as it has combinations, for each of some hundred implementations.
"""

import argparse
import collections
import concurrent.futures
import itertools
import json
import operator
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from planted import table
from planted.table import Bug
from shardproof import door

ROOT = pathlib.Path(__file__).parents[1]
REFERENCES = ("reference", "reference.flat")

#: Seconds after which an item hangs: a bug that makes ranks wait for each other is found by that, and costs as much.
_DEADLINE = 30

Records = dict[str, dict[str, Any]]


def run(bugs: Iterable[Bug], folder: pathlib.Path, *, elsewhere: bool = False) -> Records:
    """Run the item of each bug, with the bug and without it, and return the records by the ids of the items.

    Rows of the same number of GPUs and simulated size share a run of pytest. With ``elsewhere``,
    :data:`table.ELSEWHERE` is raised at the place of each bug instead of planting it.
    """
    records: Records = {}
    world = operator.attrgetter("gpus", "simulate")
    for (gpus, simulate), group in itertools.groupby(sorted(bugs, key=world), key=world):
        mine = [table.replaced(bug) if elsewhere else bug for bug in group]
        sound = [] if elsewhere else [bug.item for bug in mine]
        ids = dict.fromkeys([*sound, *(bug.with_bug(bug.item) for bug in mine)])
        options = ["--device", "cuda" if gpus else "cpu", "-n", "0", "--deadline", str(_DEADLINE)]
        options += ["--simulate", str(simulate)] if simulate else []
        names = dict.fromkeys([*(bug.implementation for bug in mine if sound), *(bug.name for bug in mine)])
        records |= records_of(ids, names, folder, *options, timeout=3600)
    return records


def records_of(
    ids: Iterable[str],
    names: Iterable[str],
    folder: pathlib.Path,
    *options: str,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    early: bool = False,
) -> Records:
    """The records of a run of items, or of files, of the suites, by the items' ids; RuntimeError without a run file.

    With ``early``, a run that ends early, or that the timeout kills, returns the records that it has written.
    """
    report = folder / "run.json"
    report.unlink(missing_ok=True)
    ids = list(ids)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command += ["-p", "planted.run"] if any("::" in one for one in ids) else []
    command += [*ids, "--impl", ",".join(names), "--report", str(report), *options]
    environment = {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1", **(environment or {})}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
        ended = f"pytest ended with {done.returncode} and no run file:\n{done.stdout}{done.stderr}"
    except subprocess.TimeoutExpired:
        if not early:
            raise
        ended = f"pytest took more than {timeout} seconds and left no run file"
    partial = report.with_name(f"{report.name}{door.PARTIAL}")
    if early and not report.exists() and partial.exists():
        cases = door.content(partial, is_journal=True).get("cases", ())
    elif report.exists():
        cases = json.loads(report.read_text())["cases"]
    else:
        raise RuntimeError(ended)
    partial.unlink(missing_ok=True)
    return {node_id(case): case for case in cases}


def search_path() -> str:
    """The value of PYTHONPATH by which pytest finds the adapters."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def node_id(case: Mapping[str, Any]) -> str:
    """The id of a record, which leaves out the implementation, as pytest has it."""
    function, _, parameters = case["id"].partition("[")
    return f"{function}[{case['implementation']}-{parameters}"


def problem(bug: Bug, records: Records) -> str | None:
    """What is wrong with a row after a run of its item: that the bug lives, or is found for another reason."""
    sound, found = records.get(bug.item), records.get(bug.with_bug(bug.item))
    if sound is None or found is None:
        return f"{bug.item} did not run"
    if sound["verdict"] != "pass":
        return f"without the bug, {bug.item} has the verdict {sound['verdict']}: {text_of(sound)}"
    if found["failure"] is None or found["verdict"] == "expected-fail":
        return f"{bug.item} has the verdict {found['verdict']} although {bug.place} is wrong"
    text = text_of(found)
    if "in edited" in text:
        return f"the edit of {bug.place} cannot be made: {text}"
    if missing := [says for says in bug.says if says not in text]:
        return f"{bug.item} fails for another reason: {missing} is not in its text:\n{text}"
    return None


def text_of(record: Mapping[str, Any]) -> str:
    """What the failure of a record says."""
    return record["failure"]["text"] if record["failure"] else ""


# The plugin of the runs.


def _asked(config: pytest.Config) -> frozenset[str]:
    return frozenset(argument.partition("::")[2] for argument in config.args if "::" in argument)


def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str) -> list[pytest.Item] | None:
    """Called by pytest; an empty list is no item."""
    asked = {one.partition("[")[0] for one in _asked(collector.config)}
    return [] if name.startswith("test_") and name not in asked else None


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Called by pytest; drops combinations before they become items."""
    asked, name = _asked(metafunc.config), metafunc.function.__name__
    metafunc._calls = [call for call in metafunc._calls if f"{name}[{call.id}]" in asked]


# The score.


def collected(*options: str, implementations: str = ",".join(REFERENCES)) -> list[str]:
    """The ids of the items of implementations that these options of pytest select."""
    command = [sys.executable, "-m", "pytest", "suites", "--impl", implementations, "--device", "cpu"]
    command += [*options, "--collect-only", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": search_path()}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=600)
    return [line for line in found.stdout.splitlines() if "::" in line]


def tries(bug: Bug, kept: Iterable[str], start: str) -> list[str]:
    """The ids, with the bug, of the kept items of its implementation that begin with a text."""
    return [bug.with_bug(item) for item in kept if item.startswith(start) and f"[{bug.implementation}-" in item]


def living(bugs: Sequence[Bug], kept: Sequence[str], jobs: int) -> list[Bug]:
    """Print where the bugs are found, and return those that live; ``kept`` are the items that the effort keeps."""
    left = [bug for bug in bugs if bug.item not in frozenset(kept)]
    counts = [len(bugs) - len(left)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as workers:
        for of in ("function", "chapter"):
            groups = collections.defaultdict(list)
            for bug in left:
                groups[bug.id if of == "chapter" else bug.file].append(bug)

            def found_in(group: list[Bug], of: str = of) -> set[str]:
                starts = [f"{bug.file}::" if of == "chapter" else f"{bug.case}[" for bug in group]
                ids = [item for bug, start in zip(group, starts, strict=True) for item in tries(bug, kept, start)]
                return _failing(ids, [bug.name for bug in group]) if ids else set()

            found = set().union(*workers.map(found_in, groups.values()))
            left = [bug for bug in left if bug.name not in found]
            counts.append(len(found))
            print(f"{len(found)} are found by another item of their {of}", flush=True)
    print(f"found by their own item {counts[0]}, by another of its function {counts[1]}, of its chapter {counts[2]}")
    return left


def _failing(ids: Iterable[str], names: Iterable[str]) -> set[str]:
    """The implementations that fail an item; what is expected to fail does not count."""
    with tempfile.TemporaryDirectory() as folder:
        records = records_of(dict.fromkeys(ids), names, pathlib.Path(folder), "--device", "cpu")
    failed = [one for one in records.values() if one["failure"] and one["verdict"] != "expected-fail"]
    lost = {one["implementation"] for one in failed if "in edited" in text_of(one)}
    assert not lost, f"the edits of {', '.join(lost)} cannot be made"
    return {one["implementation"] for one in failed}


def score(options: argparse.Namespace) -> int:
    """Count what an effort finds, and say whether that is enough."""
    kept = collected("--effort", options.effort)
    bugs = [
        bug
        for bug in table.every().values()
        if not bug.gpus and not bug.simulate and "test_drawn" not in bug.item and bug.implementation in REFERENCES
    ]
    left = living(bugs, kept, options.jobs)
    share = 1 - len(left) / len(bugs)
    print(f"{options.effort} finds {len(bugs) - len(left)} of {len(bugs)} planted bugs ({share:.1%}); these live:")
    for bug in left:
        print(f"  {bug.id}: {bug.item}")
    return 0 if share >= options.at_least else 1


# The table.


def shown(requirements: Sequence[str]) -> str:
    """The table of some requirements, or of all: their cases, and by case the bugs and their reasons."""
    marks, lines = table.contract_marks(), []
    bugs = collections.defaultdict(list)
    for bug in table.every().values():
        bugs[bug.case, bug.requirement].append(bug)
    known = {name for names in marks.values() for name in names}
    if unknown := [name for name in requirements if name not in known]:
        raise SystemExit(f"no case is marked with {', '.join(unknown)}: docs/contract.md has the requirements")
    for requirement in requirements or sorted(known, key=_in_order):
        lines.append(requirement)
        for case in [case for case, names in marks.items() if requirement in names]:
            lines.append(f"  {case}")
            lines += [f"    {bug.id}: {' / '.join(bug.says)}" for bug in bugs[case, requirement]]
    return "\n".join(lines)


def _in_order(requirement: str) -> tuple[str, int]:
    chapter, _, number = requirement.partition("-")
    return chapter, int(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table or a score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("table")
    one.add_argument("requirements", nargs="*", metavar="REQUIREMENT")
    one.set_defaults(run=lambda options: print(shown(options.requirements)) or 0)
    other = commands.add_parser("score")
    other.add_argument("--effort", default="quick", help="as of pytest (default: quick)")
    other.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    other.add_argument("--at-least", type=float, default=0.0, metavar="SHARE", help="fail if fewer are found")
    other.set_defaults(run=score)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
