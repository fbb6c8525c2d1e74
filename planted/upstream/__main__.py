"""History, replayed: runs the suites against torch with a bug that torch once had, and counts what they find.

    python -m planted.upstream [ROW ...]                    the item that found each row, with the bug and without
    python -m planted.upstream --search [--effort quick]    the chapters of each row's area, then all others
    python -m planted.upstream --page [--check]             docs/history.md, from the rows and the results

``fixes.toml`` has the rows and how they were drawn, ``dropped.toml`` what was drawn and left out, ``results.jsonl`` one
line for each row that a search has run. A search runs what the results do not have yet for this version of torch.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

from packaging.specifiers import SpecifierSet

from planted import run
from planted.table import SUITES
from planted.upstream import edit

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results.jsonl"
PAGE = run.ROOT / "docs/history.md"

_HEAD = """\
# History, replayed

Do the suites find the bugs that FSDP really had? A row is a fix that landed in PyTorch, undone in the installed torch by
one small edit ([fixes.toml](../planted/upstream/fixes.toml), whose head says how rows were drawn;
[dropped.toml](../planted/upstream/dropped.toml) has what was drawn and left out, with the reason). The rows were
frozen before the suites ran on them. A row is *found* if an item that passes on the sound torch fails twice with the
edit; *coarse* rows break more than half of the items of their chapter, so that any test would find them. Rows about
GPUs are not run here.

`python -m planted.upstream ROW` runs a row. Written by `python -m planted.upstream --page`, which
`tests/test_upstream.py` compares.
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A fix, and the edit that undoes it."""

    id: str  # the number of the pull request, with ".2" for its second row
    pr: int  # of pytorch/pytorch
    area: str  # begins the names of the chapters that are searched first
    implementation: str  # as of --impl
    says: str  # what a user sees
    place: str  # the key ``in``: the function, as "torch.module:Class.function"
    old: str  # a text that the function has once
    new: str
    torch: str = ""  # the versions that have the text, as a specifier
    gpu: bool = False  # whether only a GPU can show it

    def edited(self) -> str:
        """The module's source after the edit; ValueError if it cannot be made."""
        module, _, function = self.place.partition(":")
        *package, name = module.split(".")
        # The package torch is not imported for it.
        (root,) = importlib.util.find_spec(package[0]).submodule_search_locations
        path = pathlib.Path(root, *package[1:], f"{name}.py")
        if not path.exists():
            raise ValueError(f"there is no {path}")
        return edit.edited(path.read_text(), function, self.old, self.new)

    def skipped(self) -> str:
        """Why the row is not run here; empty if it is."""
        version = importlib.metadata.version("torch")
        if not SpecifierSet(self.torch).contains(version.partition("+")[0], prereleases=True):
            return f"needs torch{self.torch}, not {version}"
        return "needs a GPU" if self.gpu else ""

    @property
    def environment(self) -> dict[str, str]:
        """The environment of processes that have the bug."""
        paths = [str(HERE / "hook"), str(run.ROOT), os.environ.get("PYTHONPATH", "")]
        value = json.dumps([*self.place.split(":"), self.old, self.new])
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), edit.VARIABLE: value}


def rows() -> list[Row]:
    """The rows of fixes.toml; ValueError if one has another form."""
    found: list[Row] = []
    for row in tomllib.loads((HERE / "fixes.toml").read_text())["fix"]:
        earlier = sum(one.pr == row["pr"] for one in found)
        name = f"{row['pr']}.{earlier + 1}" if earlier else str(row["pr"])
        try:
            found.append(Row(id=name, place=row.pop("in"), **row))
        except (KeyError, TypeError) as error:
            raise ValueError(f"planted/upstream/fixes.toml, {name}: {error}") from error
    return found


def results(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a file of results, each with its row, torch, effort, verdict and, if found, found_by."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Search:
    """Runs rows until a time.

    Args:
        options: those of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._effort, self._limit = options.effort, options.limit
        self._until = time.monotonic() + options.budget

    @property
    def is_over(self) -> bool:
        """Whether the time has come."""
        return time.monotonic() >= self._until

    def row(self, row: Row, item: str = "") -> dict[str, Any] | None:
        """The result of a row, by one item or by a search of all; None if time was up before it was known."""
        result: dict[str, Any] = {"row": row.id, "torch": importlib.metadata.version("torch"), "effort": self._effort}
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            if item:
                found = self._confirmed(row, [item], folder)
                return None if self.is_over else result | {"verdict": "found" if found else "missed", "found_by": found}
            own = sorted(str(path.relative_to(run.ROOT)) for path in SUITES.glob(f"test_{row.area}*.py"))
            others = sorted({str(path.relative_to(run.ROOT)) for path in SUITES.glob("test_*.py")} - {*own})
            count = 0
            for files in (own, others):
                # Of its own chapter all items run, to see how many fail; elsewhere a few failures are enough.
                options = ["--effort", self._effort, *(["--maxfail", "4"] if files is others else [])]
                records = self._run(row, files, folder, *options)
                failing, ran = _failing(records), _ran(records)
                count += ran
                if files is own:
                    result |= {"coarse": 2 * len(failing) > ran, "failed": len(failing), "of": ran}
                found = self._confirmed(row, failing[:3], folder) if failing else ""
                if self.is_over:
                    return None
                if found:
                    return result | {"verdict": "found", "found_by": found, "says": _says(records[found])}
        return result | {"verdict": "missed", "ran": count}

    def _confirmed(self, row: Row, items: Sequence[str], folder: pathlib.Path) -> str:
        """The first item that passes without the bug and fails with it (again); empty if there is none."""
        sound = self._run(None, items, folder, implementation=row.implementation)
        left = [item for item in items if sound.get(item, {}).get("verdict") == "pass"]
        failing = _failing(self._run(row, left, folder)) if left else []
        return next((item for item in left if item in failing), "")

    def _run(
        self, row: Row | None, what: Iterable[str], folder: pathlib.Path, *options: str, implementation: str = ""
    ) -> run.Records:
        seconds = min(self._limit, self._until - time.monotonic())
        if seconds <= 0:
            return {}
        names = [row.implementation if row else implementation]
        options = ("--device", "cpu", "--deadline", "30", *options)
        environment = row.environment if row else {}
        try:
            return run.records_of(
                what, names, folder, *options, timeout=seconds, environment=environment, early=True
            )
        except RuntimeError as error:  # pytest itself cannot start with the bug
            if row is None and not self.is_over:
                raise
            print(f"{row.id if row else ''}: {str(error)[-300:]}", flush=True)
            return {}


def _failing(records: run.Records) -> list[str]:
    return [item for item, one in records.items() if one["verdict"] in ("harness-error", "crash", "fail", "hang")]


def _ran(records: run.Records) -> int:
    return sum(one["verdict"] not in ("unmet", "unsupported", "expected-fail") for one in records.values())


def _says(record: dict[str, Any]) -> str:
    lines = [line for line in run.text_of(record).splitlines() if line.strip()]
    return f"{record['verdict']}: {lines[0].strip()[:160]}" if lines else record["verdict"]


def _counts(chosen: Sequence[Row], known: dict[str, dict[str, Any]], key: str) -> list[tuple[str, collections.Counter]]:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in chosen:
        result = known.get(row.id)
        verdict = "needs a GPU" if row.gpu else result["verdict"] if result else "not run"
        counts[getattr(row, key)][verdict] += 1
        counts[getattr(row, key)]["coarse"] += verdict == "found" and result.get("coarse", False)
    return sorted(counts.items())


def page() -> str:
    """The text of docs/history.md."""
    every, known = rows(), {one["row"]: one for one in results(RESULTS)}
    lines = [_HEAD]
    for key in ("implementation", "area"):
        lines += [f"| {key} | rows | found | of them coarse | missed | needs a GPU | not run |", "|---|" + "---|" * 6]
        for name, count in _counts(every, known, key):
            kinds = [count[kind] for kind in ("found", "coarse", "missed", "needs a GPU", "not run")]
            lines.append(f"| {name} | {sum(kinds) - count['coarse']} | {' | '.join(map(str, kinds))} |")
        lines.append("")
    lines += ["| row | implementation, area | what a user saw | found by |", "|---|---|---|---|"]
    for row in every:
        result = known.get(row.id, {})
        seen = "needs a GPU" if row.gpu else result.get("verdict", "not run")
        if seen == "found":
            seen = f"`{result['found_by'].removeprefix('suites/')}`{' (coarse)' if result.get('coarse') else ''}"
        link = f"[{row.id}](https://github.com/pytorch/pytorch/pull/{row.pr})"
        lines.append(f"| {link} | {row.implementation}, {row.area} | {row.says} | {seen.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def replay(options: argparse.Namespace) -> int:
    """Run rows, print each result and the counts, and append what a search has found to the results."""
    every = [row for row in rows() if not options.rows or row.id in options.rows]
    version = importlib.metadata.version("torch")
    earlier = [one for path in {RESULTS, options.results} for one in results(path)]
    done = {one["row"]: one for one in earlier if (one["torch"], one["effort"]) == (version, options.effort)}
    items = {one["row"]: one["found_by"] for one in earlier if one["verdict"] == "found"}
    todo, known = [], {**done} if options.search else {}
    for row in every:
        reason = row.skipped()
        try:
            row.edited() if not reason else None
        except (ValueError, SyntaxError) as error:
            reason = f"the edit cannot be made: {error}"
        if reason:
            print(f"{row.id}: skipped, {reason}")
        elif options.search and row.id not in done or not options.search and row.id in items:
            todo.append(row)
    search, lock = Search(options), threading.Lock()

    def run_one(row: Row) -> None:
        started = time.monotonic()
        if search.is_over or (result := search.row(row, "" if options.search else items[row.id])) is None:
            return
        result["seconds"] = round(time.monotonic() - started)
        with lock:
            known[row.id] = result
            print(f"{row.id}: {result['verdict']} {result.get('found_by', '')}", flush=True)
            if options.search:
                with options.results.open("a") as file:
                    file.write(json.dumps(result) + "\n")

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as workers:
        list(workers.map(run_one, todo))
    for key in ("implementation", "area"):
        for name, count in _counts(every, known, key):
            print(f"{name}: " + ", ".join(f"{number} {verdict}" for verdict, number in count.items() if number))
    left = [row.id for row in todo if row.id not in known]
    print(f"{len(left)} rows are left for a later call" if left else "no row is left")
    return 0 if options.search or all(known[row.id]["verdict"] == "found" for row in todo if row.id in known) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay rows, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="as 88955 (default: all)")
    parser.add_argument("--search", action="store_true", help="run chapters instead of the item that found a row")
    parser.add_argument("--effort", choices=("quick", "standard"), default="quick", help="of a search")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time, each with a pytest of its own")
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS", help="ends in time; a later call resumes")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="the most that one pytest may take")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, metavar="FILE", help="where a search appends")
    parser.add_argument("--page", action="store_true", help="write docs/history.md")
    parser.add_argument("--check", action="store_true", help="with --page: compare instead; exit code 1 if out of date")
    options = parser.parse_args(arguments)
    if not options.page:
        return replay(options)
    if options.check:
        return 0 if PAGE.exists() and PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
