"""Which mistakes in the source of an implementation the suites would not see.

    python -m benchmarks sweep FOLDER [--sources fsdp_impl] [--impl reference,reference.flat] [--jobs 2] [--seconds 600]
        [--items 20] [--only NAME,NAME,...] [--changes FILE] [--rows FILE] [PYTEST_ARGUMENT ...]

Makes thousands of changes of one place in the functions of the sources: a call that is missing, a condition that is
always true, a loop without its last element (benchmarks/sweeping/changes.py). First the items that pytest selects run
once, to note which lines of the sources each of them executes in its ranks. Then, change by change, the items that
execute the changed statement run until one fails: one of each case, the fastest first, then another of each. A change
is made in live ranks, so that it costs no more than its items.

``--changes`` makes those of a table of planted bugs instead (``planted/<chapter>.toml``), or of a file of the same
form, of whose rows ``id``, ``in``, ``old`` and ``new`` are needed. ``--rows`` writes such a file: the changes that were
found, each with the item that failed and the first line of what it said, to choose new rows from.

FOLDER keeps the lines and the results. The same command goes on where an earlier one ended: it begins with the
changes that have not run, and gives those that live further items. With more ``--items`` than there are, another
PYTEST_ARGUMENT, such as the chapter about what is changed, gives them all items of it that they have not met. At the
end it prints how many the suites found, and each that lives, with the number of items that let it live. Many of those
are equivalent: read them before you write a case.

Limits: class bodies, decorators and constants of modules are not changed, and ranks with an interpreter of their own
(``own_hash_seeds``) run the code as it is. Mistakes that would be noticed at once, such as a call with its arguments
swapped, are not made.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parent
sys.path[:0] = [str(FOLDER), str(ROOT)]

from sweeping.changes import Change, changes_of  # noqa: E402
from sweeping.written import read_changes, rows_of  # noqa: E402

#: Seconds after which a case hangs: a change that makes ranks wait for each other is found by that.
_DEADLINE = 20

#: Exit codes of pytest that say nothing against a sweep: items failed, or some of the selected ones did not run.
_ENDED = (0, 1, 7)


def main() -> None:
    """Note the lines unless they are known, run changes, and print what lives."""
    options, arguments = parse()
    sources, folder = options.sources.resolve(), options.folder.resolve()
    changes = {change.name: change for change in _changes(options.changes, sources)}
    folder.mkdir(parents=True, exist_ok=True)
    _check_sources(sources, folder)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "shardproof.plugin", "-p", "sweeping.plugin",
        "-p", "no:cacheprovider", "--impl", options.impl, "--deadline", str(_DEADLINE), *(arguments or ["suites"]),
    ]  # fmt: skip
    if not list(folder.glob("lines.*.jsonl")):
        _pytest([*command, "-n", str(options.jobs)], folder, _task(sources, folder, None, float("inf")), 1)
    items = items_of(changes.values(), _lines(folder))
    results = _results(folder)
    chosen = options.only.split(",") if options.only else list(changes)
    if unknown := sorted(set(chosen) - set(changes)):
        what = "a name is FILE:LINE:NUMBER, or an id of --changes"
        raise SystemExit(f"--only {','.join(unknown)}: no such change; {what}")
    todo = order(chosen, items, results, options.items)
    given = [(dataclasses.asdict(changes[name]), names) for name, names in todo]
    task = _task(sources, folder, given, time.time() + options.seconds)
    if given:
        with tempfile.TemporaryDirectory(dir=folder, prefix="claims.") as claims:
            _pytest([*command, "-p", "no:xdist"], folder, {**task, "claims": claims}, options.jobs)
    results = _results(folder)
    if options.rows:
        found = {name: (one.killer, one.says) for name, one in results.items() if name in changes and one.killer}
        options.rows.write_text(rows_of(changes, found, sources))
    print(report(changes, items, results, sources))


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The options, and what is left for pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--sources", type=pathlib.Path, default=ROOT / "fsdp_impl")
    parser.add_argument("--impl", default="reference,reference.flat")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--items", type=int, default=20)
    parser.add_argument("--only")
    parser.add_argument("--changes", type=pathlib.Path)
    parser.add_argument("--rows", type=pathlib.Path)
    options, arguments = parser.parse_known_args()
    if not options.sources.is_dir():
        parser.error(f"--sources {options.sources}: no such folder")
    for name in ("jobs", "items"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: it must be at least 1")
    return options, arguments


def _changes(written: pathlib.Path | None, sources: pathlib.Path) -> list[Change]:
    if written is None:
        return changes_of(sources)
    try:
        return read_changes(written, sources)
    except ValueError as error:
        raise SystemExit(f"--changes {error}") from None


def _check_sources(sources: pathlib.Path, folder: pathlib.Path) -> None:
    """Lines and results belong to the sources that they were made with."""
    digest = hashlib.sha256()
    for path in sorted(sources.rglob("*.py")):
        digest.update(path.relative_to(sources).as_posix().encode() + path.read_bytes())
    known = folder / "sources"
    if known.exists() and known.read_text() != digest.hexdigest():
        raise SystemExit(f"{folder} was made with other sources than {sources} has now: name another folder")
    known.write_text(digest.hexdigest())


def _task(sources: pathlib.Path, folder: pathlib.Path, changes: Any, until: float) -> dict[str, Any]:
    return {"sources": str(sources), "folder": str(folder), "changes": changes, "until": until, "claims": ""}


def _pytest(command: Sequence[str], folder: pathlib.Path, task: dict[str, Any], jobs: int) -> None:
    """Run pytest processes beside each other, and wait for them; their output goes into files of the folder."""
    path = folder / "task.json"
    path.write_text(json.dumps(task))
    search = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": search, "SHARDPROOF_SWEEP_TASK": str(path)}
    name = "lines" if task["changes"] is None else "changes"
    logs = [folder / f"{name}.{number}.log" for number in range(jobs)]
    processes = []
    for log in logs:
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
    for process, log in zip(processes, logs, strict=True):
        if process.wait() not in _ENDED:
            raise SystemExit(f"pytest ended with exit code {process.returncode}; see {log}")


def _read(folder: pathlib.Path, kind: str) -> list[Any]:
    paths = sorted(folder.glob(f"{kind}.*.jsonl"), key=lambda path: path.stat().st_mtime)
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def _lines(folder: pathlib.Path) -> dict[str, tuple[float, set[tuple[str, int]]]]:
    """By the id of an item its seconds and the lines that it executes; what failed without a change is left out."""
    return {
        item: (seconds, {(file, line) for file, line in lines})
        for item, seconds, lines, failures in _read(folder, "lines")
        if not failures
    }


@dataclasses.dataclass
class Result:
    """What is known of a change."""

    status: str  # "found", "lives", or "unfound" if no live function has the code that it changes
    ran: frozenset[str]  # the ids of the items that ran
    killer: str | None  # the id of the item that failed
    says: str


def _results(folder: pathlib.Path) -> dict[str, Result]:
    results: dict[str, Result] = {}
    for name, status, ran, killer, says in _read(folder, "results"):
        before = results[name].ran if name in results else frozenset()
        results[name] = Result(status, before.union(ran), killer, "".join(says))
    return results


def items_of(changes: Iterable[Change], lines: dict[str, tuple[float, set[tuple[str, int]]]]) -> dict[str, list[str]]:
    """The items that execute each change, in the order in which they are to run."""
    executing = collections.defaultdict(list)
    for item, (_, executed) in lines.items():
        for line in executed:
            executing[line].append(item)
    return {
        change.name: _spread(
            {item for line in range(change.first, change.last + 1) for item in executing[change.file, line]},
            {item: seconds for item, (seconds, _) in lines.items()},
            random.Random(change.name),
        )
        for change in changes
    }


def _spread(items: set[str], seconds: dict[str, float], drawn: random.Random) -> list[str]:
    """The fastest item of each case, then the next one of each, and so on; the cases in an order that is drawn."""
    cases = collections.defaultdict(list)
    for item in sorted(items, key=lambda item: (seconds[item], item)):
        cases[item.partition("[")[0]].append(item)
    names = sorted(cases)
    drawn.shuffle(names)
    longest = max(map(len, cases.values()), default=0)
    return [cases[name][turn] for turn in range(longest) for name in names if turn < len(cases[name])]


def order(
    names: Iterable[str], items: dict[str, list[str]], results: dict[str, Result], most: int
) -> list[tuple[str, list[str]]]:
    """The changes to run, those that have not run first, each with the items that it has not met, at most so many."""
    todo = []
    for name in names:
        result = results.get(name, Result("lives", frozenset(), None, ""))
        # By their ids: another selection of pytest's may have left out items before those that ran.
        if result.status == "lives" and (left := [one for one in items[name] if one not in result.ran][:most]):
            todo.append((len(result.ran), name, left))
    random.Random(0).shuffle(todo)
    return [(name, left) for _, name, left in sorted(todo, key=lambda each: each[0])]


def report(
    changes: dict[str, Change], items: dict[str, list[str]], results: dict[str, Result], sources: pathlib.Path
) -> str:
    """How many were found, and each change that lives or that no item executes."""
    # The folder may have results of other changes as well.
    results = {name: result for name, result in results.items() if name in changes}
    counts = collections.Counter(result.status for result in results.values())
    unexecuted = [name for name in changes if not items[name]]
    shown = [
        f"{len(changes)} changes: {counts['found']} found, {counts['lives']} live, {len(unexecuted)} that no item "
        f"executes, {counts['unfound']} that could not be made, {len(changes) - len(results) - len(unexecuted)} not run"
    ]
    for name, change in changes.items():
        result = results.get(name)
        if not items[name]:
            shown.append(_shown(change, "no item executes it", sources))
        elif result is not None and result.status == "lives":
            shown.append(_shown(change, f"lives through {len(result.ran)} of {len(items[name])} items", sources))
    return "\n".join(shown)


def _shown(change: Change, what: str, sources: pathlib.Path) -> str:
    old = (sources / change.file).read_bytes()[change.start : change.end].decode()
    before, after = (" ".join(text.split()) or "(nothing)" for text in (old, change.new))
    return f"\n{change.name}  {change.kind}, in {change.function}: {what}\n  - {before}\n  + {after}"


if __name__ == "__main__":
    main()
