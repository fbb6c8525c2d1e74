"""History, replayed: runs the suites with a bug that torch or DeepSpeed once had, and counts what they find.

    python -m planted.upstream [ROW ...]                    the item that found each row, with the bug and without
    python -m planted.upstream --search [--effort quick]    the chapters of each row's area, then all others
    python -m planted.upstream ROW --item ITEM              an item of the suites, and add the result to the others

``fixes.toml`` has the rows and how they were drawn, ``dropped.toml`` what was drawn and left out, ``results.jsonl`` a
line for each row that a search has run. A search runs the rows that are named, or all that the results do not have yet
for this version of torch. Rows of a package that is not installed are skipped, and those about GPUs without
``--device cuda``.
"""

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
TORCH = importlib.metadata.version("torch")
#: Where the pull requests of a package's rows are.
REPOSITORIES = {"torch": "pytorch/pytorch", "deepspeed": "deepspeedai/DeepSpeed"}

_HEAD = """\
# History, replayed

Do the suites find the bugs that FSDP and ZeRO really had? A row is a fix that landed in PyTorch or DeepSpeed, undone in
the installed package by one small edit ([fixes.toml](../planted/upstream/fixes.toml), whose head says how rows were
drawn; [dropped.toml](../planted/upstream/dropped.toml) has what was drawn and left out, with the reason). The rows were
frozen before the suites ran on them. A row is *found* if an item that passes on the sound package fails twice with the
edit; *coarse* rows break more than half of the items of their chapter. Of an *unseen* row a user of the implementation
sees nothing in today's package, for the reason in the last column. Rows about GPUs are not run here.

A first search of 91 of PyTorch's rows, at `quick` over all chapters, found 66. Of the others 22 led to a case that was
extended or added, which has found them since; the table does not tell these apart.

Two rows of DeepSpeed are missed: with either edit memory stays that should be freed, and of implementations that do not
shard parameters the chapter about memory asks nothing.

`python -m planted.upstream ROW` runs a row. Made by `python docs/make.py history`.
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A fix, and the edit that undoes it."""

    id: str  # the number of the pull request, with ".2" for its second row
    pr: int  # of the package's repository
    area: str  # begins the names of the chapters that are searched first
    implementation: str  # as of --impl
    says: str  # what a user sees
    place: str  # the key ``in``: the function, as "package.module:Class.function"
    old: str  # a text that the function has once
    new: str
    torch: str = ""  # the versions that have the text, as a specifier
    gpu: bool = False  # whether only a GPU can show it
    unseen: str = ""  # why a user of the implementation sees nothing of the edit in today's package, as tried by hand

    @property
    def package(self) -> str:
        """The package that has the function."""
        return self.place.partition(".")[0]

    def edited(self) -> str:
        """The module's source after the edit; ValueError or SyntaxError if it cannot be made."""
        module, _, function = self.place.partition(":")
        spec = importlib.util.find_spec(self.package)  # of a submodule it would import the package
        assert spec is not None and spec.submodule_search_locations
        path = pathlib.Path(spec.submodule_search_locations[0], *module.split(".")[1:]).with_suffix(".py")
        if not path.exists():
            raise ValueError(f"there is no {path}")
        return edit.edited(path.read_text(), function, self.old, self.new)

    def skipped(self, device: str = "cpu") -> str:
        """Why the row is not run here, on this type of device; empty if it is."""
        if importlib.util.find_spec(self.package) is None:
            return f"needs {self.package}"
        if not SpecifierSet(self.torch).contains(TORCH.partition("+")[0], prereleases=True):
            return f"needs torch{self.torch}, not {TORCH}"
        return "needs a GPU" if self.gpu and device == "cpu" else self.unseen

    @property
    def environment(self) -> dict[str, str]:
        """The environment of processes that have the bug."""
        paths = [str(HERE / "hook"), str(run.ROOT), os.environ.get("PYTHONPATH", "")]
        value = json.dumps([*self.place.split(":"), self.old, self.new])
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), edit.VARIABLE: value}


def rows() -> list[Row]:
    """The rows of fixes.toml."""
    found: list[Row] = []
    for row in tomllib.loads((HERE / "fixes.toml").read_text())["fix"]:
        earlier = sum(one.pr == row["pr"] for one in found)
        found.append(Row(id=f"{row['pr']}" + f".{earlier + 1}" * (earlier > 0), place=row.pop("in"), **row))
    return found


def results(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a file of results, those of rows that were found last."""
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted(map(json.loads, lines), key=lambda one: one["verdict"] == "found")


class Search:
    """Runs rows until a time, as the options of the command line say."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.effort, self.device, self.until = options.effort, options.device, time.monotonic() + options.budget

    def row(self, row: Row, item: str) -> dict[str, Any] | None:
        """The result of a row, by one item or, without one, by a search; None if the time came before it was known."""
        versions = {name: importlib.metadata.version(name) for name in ("torch", row.package)}
        result: dict[str, Any] = {"row": row.id, **versions, "effort": self.effort, "verdict": "missed"}
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            every = {str(path.relative_to(run.ROOT)) for path in SUITES.glob("test_*.py")}
            own = {path for path in every if path.startswith(f"suites/test_{row.area}")}
            for files in [{item}] if item else [own, every - own]:
                # Of its own chapter all items run, to see how many fail; elsewhere a few failures are enough.
                options = [] if item else ["--effort", self.effort, *(["--maxfail", "4"] if files != own else [])]
                records = self._run(row.environment, row, sorted(files), folder, *options)
                failing = _failing(records)[:3]
                if files == own:
                    ran = [one for one in records.values() if one["verdict"] not in _NOT_RUN]
                    result |= {"failed": len(_failing(records)), "of": len(ran)}
                # An item counts that passes without the bug, and fails with it once more.
                sound = self._run({}, row, failing, folder)
                left = [one for one in failing if sound.get(one, {}).get("verdict") == "pass"]
                again = _failing(self._run(row.environment, row, left, folder))
                if time.monotonic() >= self.until:
                    return None
                if again:
                    result |= {"verdict": "found", "found_by": again[0], "says": _says(records[again[0]])}
                    break
        return result | {"seconds": round(time.monotonic() - started)}

    def _run(
        self, environment: dict[str, str], row: Row, what: Iterable[str], folder: pathlib.Path, *options: str
    ) -> run.Records:
        seconds = self.until - time.monotonic()
        if not what or seconds <= 0:
            return {}
        options = ("--device", self.device, "--deadline", "30", *options)
        names, limit = [row.implementation], min(seconds, 3600)
        try:
            return run.records_of(what, names, folder, *options, timeout=limit, environment=environment, early=True)
        except RuntimeError as error:  # with the bug pytest itself may not start
            if not environment and time.monotonic() < self.until:
                raise
            print(f"{row.id}: with the edit pytest does not run: {str(error)[-300:]}", flush=True)
            return {}


_NOT_RUN = ("unmet", "unsupported", "expected-fail")


def _failing(records: run.Records) -> list[str]:
    return [item for item, one in records.items() if one["verdict"] in ("harness-error", "crash", "fail", "hang")]


def _says(record: dict[str, Any]) -> str:
    lines = [line.strip() for line in run.text_of(record).splitlines() if line.strip()]
    return f"{record['verdict']}: {lines[0][:160]}" if lines else record["verdict"]


_KINDS = ("found", "coarse", "missed", "unseen", "needs a GPU", "not run")


def _kind(row: Row, known: dict[str, dict[str, Any]]) -> str:
    result = known.get(row.id, {"verdict": "not run"})
    if result["verdict"] != "found" and (row.unseen or row.gpu):
        return "unseen" if row.unseen else "needs a GPU"
    is_coarse = result["verdict"] == "found" and 2 * result.get("failed", 0) > result.get("of", 0)
    return "coarse" if is_coarse else result["verdict"]


def _counts(chosen: Sequence[Row], known: dict[str, dict[str, Any]], key: str) -> list[tuple[str, list[int]]]:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in chosen:
        counts[getattr(row, key)][_kind(row, known)] += 1
    return [(name, [count[kind] for kind in _KINDS]) for name, count in sorted(counts.items())]


def page() -> str:
    """The page of all rows and what finds each, which ``docs/make.py`` makes."""
    every, known = rows(), {one["row"]: one for one in results(RESULTS)}
    lines = [_HEAD]
    for key in ("implementation", "area"):
        lines += [f"| {key} | found | found, coarse | missed | unseen | needs a GPU | not run |", "|---" * 7 + "|"]
        lines += [f"| {name} | {' | '.join(map(str, count))} |" for name, count in _counts(every, known, key)] + [""]
    lines += ["| row | implementation, area | what a user saw | found by |", "|---|---|---|---|"]
    for row in every:
        link = f"[{row.id}](https://github.com/{REPOSITORIES[row.package]}/pull/{row.pr})"
        kind = _kind(row, known)
        by = f"unseen: {row.unseen}" if kind == "unseen" else kind
        if kind in ("found", "coarse"):
            by = f"`{known[row.id]['found_by'].removeprefix('suites/')}`"
        by = by.replace("|", "\\|") + " (coarse)" * (kind == "coarse")
        lines.append(f"| {link} | {row.implementation}, {row.area} | {row.says} | {by} |")
    return "\n".join(lines) + "\n"


def replay(options: argparse.Namespace) -> int:
    """Run rows, print each result and the counts, and append those of a search to the file of results."""
    every = [row for row in rows() if not options.rows or row.id in options.rows]
    earlier = [one for path in {RESULTS, options.results} for one in results(path)]
    same = [one for one in earlier if (one["torch"], one["effort"]) == (TORCH, options.effort)]
    known = {one["row"]: one for one in same} if options.search else {}
    items = {} if options.search else {one["row"]: one["found_by"] for one in earlier if "found_by" in one}
    items |= dict.fromkeys((row.id for row in every), options.item) if options.item else {}
    todo, search, lock = [], Search(options), threading.Lock()
    for row in every:
        reason = row.skipped(options.device)
        try:
            row.edited() if not reason else None
        except (ValueError, SyntaxError) as error:
            reason = f"the edit cannot be made: {error}"
        if reason:
            print(f"{row.id}: skipped, {reason}")
        elif row.id in items or (options.search and (options.rows or row.id not in known)):
            todo.append(row)

    def run_one(row: Row) -> None:
        if time.monotonic() >= search.until or (result := search.row(row, items.get(row.id, ""))) is None:
            return
        with lock:
            known[row.id] = result
            print(f"{row.id}: {result['verdict']} {result.get('found_by', '')}", flush=True)
            if options.search or options.item:
                with options.results.open("a") as file:
                    file.write(json.dumps(result) + "\n")

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as workers:
        list(workers.map(run_one, todo))
    for key in ("implementation", "area"):
        for name, count in _counts(every, known, key):
            shown = [f"{number} {kind}" for number, kind in zip(count, _KINDS, strict=True) if number]
            print(f"{name}: {', '.join(shown)}")
    left = [row.id for row in todo if row.id not in known]
    print(f"{len(left)} rows are left for a later call" if left else "no row is left")
    return 0 if options.search else any(known[row.id]["verdict"] == "missed" for row in todo if row.id in known)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="as 88955 (default: all)")
    parser.add_argument("--search", action="store_true", help="run chapters instead of the item that found a row")
    parser.add_argument("--item", metavar="ITEM", help="run this item of the suites, as its id is in pytest")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="on which rows run")
    parser.add_argument("--effort", choices=("quick", "standard"), default="quick", help="of a search")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time, each with a pytest of its own")
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS", help="a later call resumes")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, metavar="FILE", help="where a search appends")
    options = parser.parse_args(arguments)
    if options.item and (options.search or not options.rows):
        parser.error("--item runs named rows, and no search")
    return replay(options)


if __name__ == "__main__":
    sys.exit(main())
