"""Mutants of what is tested: changes its source by rules, and runs the items that cover the place.

    python -m planted.mutants run FILE [--group NAME] [--jobs 2]    appends results to FILE until --seconds are over
    python -m planted.mutants report FILE                           what was found, and the survivors by function
    python -m planted.mutants gate FILE [--in PLACE]                how many of those found a run of --changed finds
    python -m planted.mutants list [--group NAME]                   the mutants that are drawn

Of each group of functions ``--count`` mutants are drawn with ``--seed``, among the functions that items call by the map
(``coverage.py``): evenly over functions, and in a function over the rules of ``rules.py``. ``run`` begins where an
earlier call ended, however that one did; a later call with more ``--items`` goes on with the survivors. An item finds a
mutant that fails with it, and passes without it.

``reasons/mutants.toml`` marks mutants that no case can find. They do not run.
"""

import argparse
import collections
import dataclasses
import fnmatch
import functools
import importlib.metadata
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from planted import coverage, run
from planted.mutants import gate, rules, tries
from planted.mutants.rules import Mutant
from shardproof import door
from shardproof.harness.plugin import changed, hooks
from shardproof.harness.plugin.options import Effort
from shardproof.harness.worlds import instruments

TORCH = importlib.metadata.version("torch")
MARKS = pathlib.Path(__file__).parents[1] / "reasons/mutants.toml"
#: Why no case can find a mutant, by kind.
KINDS = {"equivalent": "user code sees no difference", "gpu": "only a GPU shows the difference"}


@dataclasses.dataclass(frozen=True)
class Group:
    """Functions, and the implementations whose items cover them."""

    modules: tuple[str, ...]  # modules or packages
    without: tuple[str, ...]  # those of them that are left out
    implementations: tuple[str, ...]

    def has(self, place: str) -> bool:
        """Whether a function belongs to the group."""
        return coverage.is_in(place, self.modules) and not coverage.is_in(place, self.without)


_FSDP2 = "torch.distributed.fsdp._fully_shard"
GROUPS = {
    "fsdp1": Group(("torch.distributed.fsdp",), (_FSDP2,), ("torch.fsdp",)),
    "fsdp2": Group((_FSDP2,), (), ("torch.fully_shard",)),
    "helpers": Group(
        ("torch.distributed.checkpoint.state_dict", "torch.distributed._state_dict_utils"),
        (),
        ("torch.fully_shard", "torch.fsdp"),
    ),
    "reference": Group(("fsdp_impl",), (), ("reference", "reference.flat")),
}


# The draw.


def drawn(group: Group, known: changed.Map, *, count: int, seed: int, inside: str = "") -> list[Mutant]:
    """The first mutants of a group that can be planted, in the order of the draw.

    Args:
        group: the group.
        known: the map.
        count: how many at most.
        seed: of the draw.
        inside: only mutants of this module, class or function.
    """
    called = {name for one in group.implementations for names in known.items.get(one, {}).values() for name in names}
    reasons, found = coverage.reasons(), {}
    for place in sorted(called):
        if group.has(place) and (not inside or coverage.is_in(place, [inside])):
            module, _, name = place.partition(":")
            if (path := rules.path_of(module)) is not None:
                found[place] = rules.mutants_of(rules.source_of(path), module, name, reasons)
    return list(itertools.islice(filter(_can_be_planted, rules.in_order(found, seed)), count))


def _can_be_planted(mutant: Mutant) -> bool:
    try:
        return bool(tries.packed_of(mutant))
    except ValueError:
        return False


# The marks.


@dataclasses.dataclass(frozen=True)
class Mark:
    """Why no case can find some mutants: a row of ``reasons/mutants.toml``.

    Attributes:
        kind: one of :data:`KINDS`.
        why: the reason, in one sentence.
        place: the key ``in``: functions, classes, modules or packages.
        rules: the rules; all without it.
        old: patterns of the old texts, in which white space is one blank and brackets are literal; any without it.
        new: patterns of the new texts; any without it.
    """

    kind: str
    why: str
    place: tuple[str, ...]
    rules: tuple[str, ...] = ()
    old: tuple[str, ...] = ("*",)
    new: tuple[str, ...] = ("*",)

    def covers(self, one: Mapping[str, Any]) -> bool:
        """Whether the mutant of a result is meant."""
        is_there = coverage.is_in(one["place"], self.place) and (not self.rules or one["rule"] in self.rules)
        return is_there and _is_one_of(one["old"], self.old) and _is_one_of(one["new"], self.new)


def _is_one_of(text: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(" ".join(text.split()), one.replace("[", "[[]")) for one in patterns)


@functools.cache
def marks() -> list[Mark]:
    """The rows of ``reasons/mutants.toml``; ValueError for a kind that there is not."""
    return [
        Mark(
            row["kind"], row["why"], coverage.several(row["in"]), coverage.several(row.get("rule", [])),
            coverage.several(row.get("old", "*")), coverage.several(row.get("new", "*")),
        )
        for row in coverage.rows_of(MARKS, "mutant", KINDS, "in")
    ]  # fmt: skip


# The results.


@dataclasses.dataclass
class Result:
    """What all calls have seen of one mutant.

    Attributes:
        line: the newest line of the mutant.
        ran: the items that ran, by effort.
        reached: with how many of them a rank came to the changed statement.
        covering: how many items of an effort call its function.
        found_by: the item that found it, by effort; empty for a survivor.
    """

    line: dict[str, Any]
    ran: dict[str, list[str]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    reached: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    covering: dict[str, int] = dataclasses.field(default_factory=dict)
    found_by: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, line: dict[str, Any]) -> None:
        """Add what a call has seen."""
        effort = line["effort"]
        self.line = line
        self.ran[effort] += line["ran"]
        self.reached[effort] += line["reached"]
        self.covering[effort] = line["covering"]
        if "found_by" in line:
            self.found_by[effort] = line["found_by"]

    def is_done(self, items: int, effort: str) -> bool:
        """Whether no item of an effort is left of as many as may run; of one that was marked, and is no more, all are.

        What an item of quick finds is found by one of standard.
        """
        if self.line.get("is_marked") or (effort not in self.covering and not self.is_found(effort)):
            return False
        counts = len(self.ran[effort]), self.reached[effort]
        return self.is_found(effort) or tries.is_enough(*counts, items=items, covering=self.covering[effort])

    def is_found(self, effort: str) -> bool:
        """Whether an item of an effort has found it."""
        return bool(self.found_by) if effort == Effort.STANDARD else effort in self.found_by

    def said(self) -> str:
        """How many items ran, of each effort."""
        parts = [
            f"{len(ran)} of {self.covering[effort]} items of {effort} ran, {self.reached[effort]} came to it"
            for effort, ran in self.ran.items()
            if ran
        ]
        return ", ".join(parts) or "not run"

    def before(self, effort: str) -> tries.Before:
        """What a call of an effort needs to know of earlier ones."""
        others = [item for other, ran in self.ran.items() if other != effort for item in ran]
        return tries.Before(self.ran[effort], self.reached[effort], others)


def results(lines: Iterable[dict[str, Any]]) -> dict[str, Result]:
    """The results of a version of torch, by the ids of mutants."""
    found: dict[str, Result] = {}
    for line in lines:
        if "id" in line:
            found.setdefault(line["id"], Result(line)).add(line)
    return found


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a file of results; none of one that is not there yet."""
    return [*coverage.lines_in(path)] if path.exists() else []


def report(found: Mapping[str, Result], rows: Sequence[Mark]) -> str:
    """The counts by group and by rule, and the survivors by function."""
    lines = []
    has_quick = any(Effort.QUICK in one.covering for one in found.values())
    for key in ("group", "rule"):
        lines += [f"{key:<12}{'mutants':>8}{'found':>8}{'survived':>10}{'marked':>8}"]
        for name in dict.fromkeys(one.line[key] for one in found.values()):
            mine = [one for one in found.values() if one.line[key] == name]
            kinds = collections.Counter(_kind(one, rows) for one in mine)
            unmarked = max(1, len(mine) - kinds["marked"])
            share = f"{kinds['found'] / unmarked:.1%} of those not marked are found"
            share += f", {sum(one.is_found(Effort.QUICK) for one in mine) / unmarked:.1%} at quick" if has_quick else ""
            share += f", {kinds['marked'] / len(mine):.1%} are marked"
            counts = f"{len(mine):>8}{kinds['found']:>8}{kinds['survived']:>10}{kinds['marked']:>8}"
            lines.append(f"{name:<12}{counts}  {share}")
        lines.append("")
    by_place = collections.defaultdict(list)
    for one in found.values():
        if not one.found_by:
            by_place[one.line["place"]].append(one)
    for place, survivors in sorted(by_place.items()):
        lines.append(place)
        for one in sorted(survivors, key=lambda one: int(one.line["line"])):
            line, mark = one.line, next((row for row in rows if row.covers(one.line)), None)
            edit = f"{line['rule']}: {_short(line['old'])} -> {_short(line['new'])}"
            lines.append(f"  {line['line']}: {edit}; {one.said()}")
            lines += [f"      {mark.kind}: {mark.why}"] if mark else []
    for row in rows:
        covered = [one for one in found.values() if row.covers(one.line)]
        if any(one.found_by for one in covered):
            lines.append(f"A row of {MARKS.name} covers a mutant that is found: {row}")
    return "\n".join(lines)


def _kind(one: Result, rows: Sequence[Mark]) -> str:
    if one.found_by:
        return "found"
    return "marked" if any(row.covers(one.line) for row in rows) else "survived"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return f"`{text}`" if len(text) <= 100 else f"`{text[:60]} ... {text[-36:]}`"


# A call.


def read_lines(path: pathlib.Path) -> dict[str, dict[str, list[str]]]:
    """By module and line, the items that come there; ValueError, one line, for a file of another torch, or another."""
    try:
        content: Any = door.content(path, is_journal=False)
        made, lines = content["torch"], dict(content["lines"])
    except (OSError, RecursionError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else f"it is none ({error!r})"
        raise ValueError(f"--lines {path}: {why}; python -m planted.coverage page makes {coverage.LINES}") from None
    if made != coverage.installed():
        raise ValueError(f"--lines {path}: it is of torch {made}, and this is {coverage.installed()}")
    return lines


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, Mutant]]:
    """The mutants that the options draw, the first of each group before the second of any."""
    known = changed.read(options.map)
    names = options.group or list(GROUPS)
    for name in names:
        if not any(known.items.get(one) for one in GROUPS[name].implementations):
            lacks = " and ".join(GROUPS[name].implementations)
            print(f"{name}: the map has no item of {lacks}; docs/coverage.md says how to add them", file=sys.stderr)
    draw = functools.partial(drawn, known=known, count=options.count, seed=options.seed, inside=options.inside)
    for turn in itertools.zip_longest(*([(name, one) for one in draw(GROUPS[name])] for name in names)):
        yield from filter(None, turn)


def listed(options: argparse.Namespace) -> int:
    """Print the draw."""
    for name, one in chosen(options):
        print(f"{one.id} {name} {one.place} line {one.line} {one.rule}: {_short(one.old)} -> {_short(one.new)}")
    return 0


def ran(options: argparse.Namespace) -> int:
    """Run what is left of the draw, for the time that there is."""
    until = time.time() + options.seconds
    lines = [one for one in read(options.file) if one["torch"] == TORCH]
    known, todo = results(lines), []
    for group, mutant in chosen(options):
        fields = dataclasses.asdict(mutant)
        before = known.get(mutant.id)
        is_done = before is not None and before.is_done(options.items, options.effort)
        if not any(row.covers(fields) for row in marks()) and not is_done:
            todo.append((group, fields, dataclasses.asdict((before or Result(fields)).before(options.effort))))
        elif before is None:
            line = {"id": mutant.id, "group": group, "torch": TORCH, **fields, "effort": options.effort, "ran": []}
            tries.append(options.file, {**line, "reached": 0, "covering": 0, "is_marked": True})
    if todo:
        _run(options, todo, until, [one["unsound"] for one in lines if "unsound" in one])
    after = results(one for one in read(options.file) if one["torch"] == TORCH)
    ended = (after.get(Mutant(**fields).id) for _, fields, _ in todo)
    left = sum(one is None or not one.is_done(options.items, options.effort) for one in ended)
    found = sum(one.is_found(options.effort) for one in after.values())
    print(f"{found} of {len(after)} are found at {options.effort}; {left} mutants are left for a later call")
    return 0


def _run(options: argparse.Namespace, todo: list[Any], until: float, unsound: list[str]) -> None:
    names = dict.fromkeys(name for group, *_ in todo for name in GROUPS[group].implementations)
    command = [sys.executable, "-m", "pytest", "suites", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command += ["-p", "planted.mutants.tries", "--impl", ",".join(names), "--device", "cpu"]
    command += ["--effort", options.effort, "--deadline", str(options.deadline), "-n", "0"]
    with tempfile.TemporaryDirectory(prefix="m") as name:
        folder = pathlib.Path(name)
        (folder / "claims").mkdir()
        terminal = os.dup(sys.stdout.fileno())
        settings = tries.TrySettings(
            results=str(options.file.absolute()), claims=str(folder / "claims"), map=str(options.map.absolute()),
            lines=read_lines(options.lines) if options.lines else {}, effort=options.effort, items=options.items,
            until=until, torch=TORCH, mutants=todo, unsound=unsound,
            implementations={name: list(one.implementations) for name, one in GROUPS.items()}, terminal=terminal,
        )  # fmt: skip
        (folder / "settings").write_text(json.dumps(dataclasses.asdict(settings)))
        # A call that is terminated ends its processes.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        processes = [_started(command, folder, job, terminal) for job in range(min(options.jobs, len(todo)))]
        try:
            for process in processes:
                process.wait(max(1.0, until + tries.GRACE - time.time()))
        except subprocess.TimeoutExpired:
            print("a process did not end in time, and is killed", flush=True)
        finally:
            for job, process in enumerate(processes):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                if process.returncode > 0 and process.returncode != hooks.INCOMPLETE:  # no item has a record
                    print(f"process {job} failed:\n{(folder / f'{job}.out').read_text()[-2000:]}", flush=True)
            os.close(terminal)
            signal.signal(signal.SIGTERM, before)


def _started(command: Sequence[str], folder: pathlib.Path, job: int, terminal: int) -> subprocess.Popen[bytes]:
    """Start one process, with temporary files and leases of its own: several worlds may share a core."""
    own = folder / str(job)
    own.mkdir()
    environment = {
        **os.environ, "PYTHONPATH": run.search_path(), "OMP_NUM_THREADS": "1", "TMPDIR": str(own),
        tries.VARIABLE: str(folder / "settings"), **instruments.environment(own, "planted.mutants.plant:planted"),
    }  # fmt: skip
    with (folder / f"{job}.out").open("wb") as output:
        # A session of its own, so that its ranks end with it.
        return subprocess.Popen(
            command, cwd=run.ROOT, env=environment, stdout=output, stderr=output, start_new_session=True,
            pass_fds=(terminal,),
        )  # fmt: skip


def reported(options: argparse.Namespace) -> int:
    """Print the report of a file, for each version of torch that it has."""
    lines = read(options.file)
    for version in dict.fromkeys(one["torch"] for one in lines):
        print(f"torch {version}")
        print(report(results(one for one in lines if one["torch"] == version), marks()))
        unsound = [one["unsound"] for one in lines if "unsound" in one and one["torch"] == version]
        print(f"{len(unsound)} items do not pass without a mutant", *unsound, sep="\n  ")
    return 0


def gated(options: argparse.Namespace) -> int:
    """Ask runs of ``--changed`` for mutants that items of a file have found, as ``gate`` does."""
    lines = [one for one in read(options.file) if one["torch"] == TORCH]
    found = [one.line for one in results(lines).values() if one.found_by]
    mine = [one for one in found if not options.inside or coverage.is_in(one["place"], [options.inside])]
    names = [field.name for field in dataclasses.fields(Mutant)]
    chosen = [
        (one["group"], Mutant(**{name: one[name] for name in names}), GROUPS[one["group"]].implementations)
        for one in sorted(mine, key=lambda one: str(one["id"]))[: options.count]
    ]
    unsound = {one["unsound"] for one in lines if "unsound" in one}
    number = 0
    for one in gate.asked(chosen, unsound=unsound, known=options.map, seconds=options.seconds, jobs=options.jobs):
        number += bool(one["found_by"])
        print(tries.said(one), flush=True)
    print(f"{number} of {len(chosen)} are found in {options.seconds:g} s by the items that --changed asks")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw mutants, run them, or print what earlier calls have seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument("--in", dest="inside", default="", metavar="PLACE", help="a module, or MODULE:CLASS.FUNCTION")
    place.add_argument("--map", type=pathlib.Path, default=changed.PACKED, metavar="FILE", help="of items to functions")
    draw = argparse.ArgumentParser(add_help=False, parents=[place])
    draw.add_argument("--group", action="append", choices=GROUPS, help="may be given several times (default: all)")
    draw.add_argument("--count", type=int, default=400, help="mutants of each group (default: 400)")
    draw.add_argument("--seed", type=int, default=1, help="of the draw (default: 1)")
    one = commands.add_parser("run", parents=[draw])
    one.add_argument("file", type=pathlib.Path, metavar="FILE", help="the results, a line each; they are appended")
    efforts = (Effort.QUICK, Effort.STANDARD)
    one.add_argument("--effort", type=Effort, default=efforts[1], choices=efforts, help="whose items run")
    one.add_argument(
        "--lines", type=pathlib.Path, metavar="FILE", help="items that come to a line; they take turns with others"
    )
    one.add_argument("--items", type=int, default=20, help="that come to a mutant (default: 20); thrice as many run")
    one.add_argument("--seconds", type=float, default=540, help="after which no item begins (default: 540)")
    one.add_argument("--jobs", type=int, default=2, help="processes, each with worlds of its own (default: 2)")
    one.add_argument("--deadline", type=float, default=15, help="seconds of an item (default: 15)")
    one.set_defaults(run=ran)
    other = commands.add_parser("list", parents=[draw])
    other.set_defaults(run=listed)
    other = commands.add_parser("gate", parents=[place])
    other.add_argument("file", type=pathlib.Path, metavar="FILE", help="the results of run")
    other.add_argument("--count", type=int, default=50, help="mutants (default: 50)")
    other.add_argument("--seconds", type=float, default=60, help="of each run (default: 60)")
    other.add_argument("--jobs", type=int, default=1, help="runs at once, each on two cores of its own (default: 1)")
    other.set_defaults(run=gated)
    other = commands.add_parser("report")
    other.add_argument("file", type=pathlib.Path, metavar="FILE")
    other.set_defaults(run=reported)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
