"""Counts the planted bugs that an effort finds: ``python -m tests.harness.found --effort quick``.

Each bug has an item that was written for it. An effort that leaves this item out may find the bug by another one: the
items of the same function that it keeps are run, and where they pass, those of the chapter. Items of other chapters are
not run. Bugs that several GPUs, simulated worlds or drawn cases find are not counted, nor those of the five files whose
bugs share their items.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence

from tests.harness import killers
from tests.harness.inner import NO_HYPOTHESIS, PYTHONPATH
from tests.harness.planted import name_of

ROOT = pathlib.Path(__file__).parents[2]
ON_GPUS = "test_planted_streams"


@dataclasses.dataclass(frozen=True)
class Bug:
    """A bug, and the ids of the items that might find it, in order.

    Attributes:
        name: of the table.
        implementation: as of ``--impl``.
        item: the one that was written for it, of its reference.
        function: those of the same function that the effort keeps, of the bug.
        chapter: those of the same chapter.
    """

    name: str
    implementation: str
    item: str
    function: tuple[str, ...]
    chapter: tuple[str, ...]


def bugs_of(tables: killers.Bugs, items: Sequence[str], kept: Sequence[str]) -> list[Bug]:
    """The bugs of tables.

    Args:
        tables: by bug, its adapter and the expression of its item.
        items: the ids of the items of both references.
        kept: those that the effort keeps.

    Raises:
        ValueError: an expression names no item, or several.
    """
    found = []
    for name, (adapter, expression) in tables.items():
        sound, implementation = killers.sound(adapter), name_of(adapter)
        named = killers.hits(items, sound, expression)
        if len(named) != 1:
            raise ValueError(f"the killer of {name} names {named} instead of one item")
        own = [one.replace(f"[{sound}-", f"[{implementation}-") for one in kept if f"[{sound}-" in one]
        function = named[0].partition("[")[0]
        file = function.partition("::")[0]
        found.append(
            Bug(
                name,
                implementation,
                named[0],
                function=tuple(one for one in own if one.startswith(f"{function}[")),
                chapter=tuple(one for one in own if one.startswith(f"{file}::")),
            )
        )
    return found


def failing(ids: Iterable[str], implementations: Iterable[str]) -> set[str]:
    """Run items, and return the implementations that fail one; what is expected to fail does not count."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "run.json"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *NO_HYPOTHESIS, "-q", *ids]
        command += ["--impl", ",".join(implementations), "--device", "cpu", "--report", str(report)]
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError(f"the run of {', '.join(implementations)} wrote no report:\n{done.stdout}{done.stderr}")
        cases = json.loads(report.read_text())["cases"]
    failed = [one for one in cases if one["failure"] and one["verdict"] != "expected-fail"]
    unedited = {one["implementation"] for one in failed if "in edited" in one["failure"]["text"]}
    assert not unedited, f"the edits of {', '.join(unedited)} do not find their places"
    return {one["implementation"] for one in failed}


def found_in_functions(bugs: Sequence[Bug], workers: concurrent.futures.Executor) -> set[str]:
    """The implementations of the bugs that an item of their function finds; the bugs of a chapter share a run."""
    shared: dict[str, list[Bug]] = collections.defaultdict(list)
    for bug in bugs:
        if bug.function:
            shared[bug.item.partition("::")[0]].append(bug)

    def of_chapter(chapter: str) -> set[str]:
        own = shared[chapter]
        found = failing((one for bug in own for one in bug.function), [bug.implementation for bug in own])
        print(f"{chapter}: {len(found)} of {len(own)} are found in their functions", flush=True)
        return found

    return set().union(*workers.map(of_chapter, shared))


def found_in_chapters(bugs: Sequence[Bug], workers: concurrent.futures.Executor) -> set[str]:
    """The implementations of the bugs that an item of their chapter finds."""

    def of_bug(bug: Bug) -> set[str]:
        # Without an id pytest would run everything.
        found = failing(bug.chapter, [bug.implementation]) if bug.chapter else set()
        print(f"{bug.name}: {'found in its chapter' if found else 'lives'}", flush=True)
        return found

    return set().union(*workers.map(of_bug, bugs))


def count(bugs: Sequence[Bug], kept: Iterable[str], jobs: int) -> list[Bug]:
    """Print where the bugs are found, and return those that live.

    Args:
        bugs: all.
        kept: the ids of the items of both references that the effort keeps.
        jobs: how many runs go on at a time.
    """
    own = set(kept)
    left = [bug for bug in bugs if bug.item not in own]
    counts = [len(bugs) - len(left)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as workers:
        for step in (found_in_functions, found_in_chapters):
            found = step(left, workers)
            counts.append(len(found))
            left = [bug for bug in left if bug.implementation not in found]
    print(f"found by their own item {counts[0]}, by another of its function {counts[1]}, of its chapter {counts[2]}")
    return left


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print, and say whether enough are found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--effort", default="quick", help="as of pytest (default: quick)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="SHARE", help="fail if fewer are found")
    options = parser.parse_args(arguments)
    tables = [killers.of_composition(), killers.of_training()]
    tables += [killers.of_module(module) for module in killers.MODULES if module != ON_GPUS]
    kept = killers.collected("suites", "--effort", options.effort)
    items = killers.collected("suites", "-m", "nightly or not nightly")
    bugs = [bug for table in tables for bug in bugs_of(table, items, kept)]
    living = count(bugs, kept, options.jobs)
    share = 1 - len(living) / len(bugs)
    print(f"{options.effort} finds {len(bugs) - len(living)} of {len(bugs)} planted bugs ({share:.1%}); these live:")
    for bug in living:
        print(f"  {bug.name}: {bug.item}")
    return 0 if share >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
