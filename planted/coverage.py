"""Measures which branches of an implementation's Python the suites take, and which items call which of its functions.

    python -m planted.coverage run FOLDER [options of pytest]    the suites, watched; several runs may fill one folder
    python -m planted.coverage page FOLDER [--onto MAP]          what is made of these runs, in FOLDER
    python -m planted.coverage time MAP RUN...                   how long its items run, by run files made without it

``run`` has two instruments in each rank: :func:`branches`, and ``surface.calls``. Coverage's C tracer begins with the
first case of a process, after the fork, and each item leaves a line in a file of its process: a rank that is killed
loses the item that it ran, and no other. ``branches.md`` lists by function the branches that no item takes, each with
its reason from ``reasons/branches.toml``, or "open"; ``lines.json.gz`` has by line some items that came to it, for
mutants (``mutants/``); ``functions.json.gz`` has the functions that each item calls, for ``--changed``
(``harness/plugin/changed.py``) and for mutants, with ``--onto`` after the items of another map, of implementations that
were not run again. All belong to the installed version of torch.

Branches of the modules themselves are left out: they run when torch is imported, before a rank is forked.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gzip
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from packaging.specifiers import SpecifierSet

from planted import run
from shardproof import door
from shardproof.harness.plugin import changed
from shardproof.harness.worlds import instruments
from shardproof.runfile import Verdict

#: Reasons why no item takes a branch, by kind.
KINDS = {
    "gpu": "only a GPU reaches it",
    "refused": "it raises, and no user code that is allowed reaches it",
    "dead": "nothing reaches it in this version of torch",
}
REASONS = pathlib.Path(__file__).parent / "reasons/branches.toml"

#: The modules that are measured, as prefixes of modules: those that the contract is about.
MEASURED = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed._state_dict_utils",
)
#: Those whose functions alone the map has: the reference implementation.
MAPPED = ("fsdp_impl",)

T = TypeVar("T")

Arc = tuple[int, int]

LINES = "lines.json.gz"
"""The name of the file with the items that come to a line."""


def installed() -> str:
    """The release of the installed torch, such as "2.13.0"."""
    return importlib.metadata.version("torch").partition("+")[0]


@functools.cache
def measured() -> dict[str, pathlib.Path]:
    """The files that are measured or mapped, by the names of their modules."""
    found = {}
    for name in (*MEASURED, *MAPPED):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, f"{name} is no module of this torch"
        if not spec.submodule_search_locations:
            found[name] = pathlib.Path(spec.origin).resolve()  # as coverage names it
            continue
        folder = pathlib.Path(spec.origin).resolve().parent
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([name, *(part for part in parts if part != "__init__")])] = path
    return found


# In a rank.


class _Tracer:
    """The tracer of one process, from its first case to its end."""

    def __init__(self) -> None:
        import coverage

        names = {str(path): name for name, path in measured().items()}
        self._names = names
        self._coverage = coverage.Coverage(
            data_file=None, branch=True, config_file=False, include=list(names), messages=False
        )
        self._seen: dict[str, set[Arc]] = collections.defaultdict(set)
        self._coverage.start()

    def taken(self) -> dict[str, set[Arc]]:
        """The arcs since the last call, by module."""
        data = self._coverage.get_data()
        arcs = {self._names[file]: set(data.arcs(file) or ()) for file in data.measured_files()}
        data.erase()
        return arcs

    def line(self, item: str) -> dict[str, Any]:
        """What an item did: the first lines of the functions that it called, and arcs that the process takes first."""
        entered, new = {}, {}
        for name, arcs in self.taken().items():
            entered[name] = sorted(-start for start, _ in arcs if start < 0)
            if fresh := arcs - self._seen[name]:
                new[name] = sorted(fresh)
                self._seen[name] |= fresh
        return {"item": item, "entered": entered, "arcs": new}


_tracer = functools.cache(_Tracer)


@contextlib.contextmanager
def branches(folder: pathlib.Path, rank: int, job: Any) -> Iterator[None]:
    """Write down what a case takes: an instrument (``harness/worlds/instruments.py``)."""
    tracer = _tracer()
    tracer.taken()
    try:
        yield
    finally:
        with (folder / f"{os.getpid()}.branches").open("a") as file:
            file.write(json.dumps(tracer.line(job.item)) + "\n")


# After a run.


@dataclasses.dataclass(frozen=True)
class Branch:
    """A way out of a line that has several.

    Attributes:
        module: the module's name.
        function: the qualified name of the function in the module.
        start: the line that branches.
        end: the line that it leads to, or a negative number: out of the function.
        taken: whether an item takes it.
        text: the source of the line that branches.
        target: the source of the line that it leads to; "the end of the function" if it leaves it.
    """

    module: str
    function: str
    start: int
    end: int
    taken: bool
    text: str
    target: str


@dataclasses.dataclass
class Taken:
    """What the runs of a folder took.

    Attributes:
        arcs: pairs of lines, by module; a negative one enters or leaves a function.
        items: by item, the functions that it calls, as "module:qualified name".
    """

    arcs: dict[str, set[Arc]]
    items: dict[str, set[str]]


def taken(folder: pathlib.Path) -> Taken:
    """Join what the ranks have left in a folder; the end of a line that a killed rank began is dropped."""
    found = Taken(collections.defaultdict(set), collections.defaultdict(set))
    for line in lines_of(folder, "branches"):
        for module, arcs in line["arcs"].items():
            found.arcs[module] |= {(start, end) for start, end in arcs}
        for module, starts in line["entered"].items():
            names = functions(module)
            found.items[line["item"]] |= {f"{module}:{names[start]}" for start in starts if start in names}
    return found


def comers(folder: pathlib.Path) -> dict[str, dict[int, list[str]]]:
    """By module and line, the items with which a process came there first: as many as there were processes, at most."""
    found: dict[str, dict[int, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    for line in lines_of(folder, "branches"):
        for module, arcs in line["arcs"].items():
            for number in {abs(one) for arc in arcs for one in arc}:
                found[module][number].add(line["item"])
    return {
        module: {number: sorted(items) for number, items in sorted(lines.items())} for module, lines in found.items()
    }


def lines_of(folder: pathlib.Path, ending: str) -> Iterator[dict[str, Any]]:
    """The lines that ranks of watched runs have left in files of an ending, without one that a killed rank began."""
    for path in sorted(folder.glob(f"*.{ending}")):
        yield from lines_in(path)


def lines_in(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The lines of a file to which processes append JSON, without one that a killed process began."""
    for text in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(text)


def is_in(place: str, names: Collection[str]) -> bool:
    """Whether a function, "module:qualified name", is one of these functions, or in one of these classes or modules."""
    return place in names or any(place.startswith((f"{one}.", f"{one}:")) for one in names)


def rows_of(path: pathlib.Path, key: str, kinds: Collection[str], place: str) -> list[dict[str, Any]]:
    """The rows of a table of reasons; ValueError for a kind that there is not, with the row's place."""
    rows: list[dict[str, Any]] = tomllib.loads(path.read_text()).get(key, [])
    for row in rows:
        if row["kind"] not in kinds:
            raise ValueError(f"{path.name}: kind {row['kind']!r} of {row[place]} is none of {', '.join(kinds)}")
    return rows


@functools.cache
def functions(module: str) -> dict[int, str]:
    """The qualified names of a module's functions, by the line with which their code begins (a decorator's, too)."""
    return {first: name for first, _, name in changed.functions_in(measured()[module])}


def branches_of(arcs: dict[str, set[Arc]]) -> list[Branch]:
    """All branches of the functions of the measured modules, as coverage finds them in the source."""
    import coverage

    paths = {name: path for name, path in measured().items() if name.startswith(MEASURED)}
    with tempfile.TemporaryDirectory() as folder:
        data = coverage.CoverageData(f"{folder}/data")
        data.add_arcs({str(paths[name]): sorted(found) for name, found in arcs.items() if name in paths})
        data.touch_files(map(str, paths.values()))
        data.write()
        reader = coverage.Coverage(data_file=f"{folder}/data", branch=True, config_file=False, messages=False)
        reader.load()
        reader.json_report(outfile=f"{folder}/report.json")
        report = json.loads(pathlib.Path(folder, "report.json").read_text())["files"]
    files = {pathlib.Path(file).absolute(): content for file, content in report.items()}
    found = []
    for module, path in paths.items():
        lines = path.read_text().splitlines()
        for function, content in files.get(path.absolute(), {"functions": {}})["functions"].items():
            ways = [(way, True) for way in content["executed_branches"]]
            ways += [(way, False) for way in content["missing_branches"]]
            for (start, end), is_taken in ways if function else ():
                target = lines[end - 1].strip() if end > 0 else "the end of the function"
                found.append(Branch(module, function, start, end, is_taken, lines[start - 1].strip(), target))
    return sorted(found, key=lambda one: (one.module, one.start, one.end))


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why no item takes some branches: a row of ``reasons/branches.toml``.

    Attributes:
        kind: one of :data:`KINDS`.
        why: the reason, in one sentence.
        places: the key ``in``: functions, as "module:Class.function", classes, modules, or packages.
        lines: the beginnings of the lines that branch; "" for each line of the places.
        targets: the beginnings of the lines that the branches lead to; "" for each.
    """

    kind: str
    why: str
    places: tuple[str, ...]
    lines: tuple[str, ...] = ("",)
    targets: tuple[str, ...] = ("",)

    def covers(self, branch: Branch) -> bool:
        is_there = is_in(f"{branch.module}:{branch.function}", self.places)
        return is_there and branch.text.startswith(self.lines) and branch.target.startswith(self.targets)

    def parts(self) -> Iterator["Reason"]:
        """The row once for each entry of each of its lists."""
        for key in ("places", "lines", "targets"):
            for entry in getattr(self, key):
                yield dataclasses.replace(self, **{key: (entry,)})


def several(value: str | list[str]) -> tuple[str, ...]:
    """The texts of a key that may be a list."""
    return (value,) if isinstance(value, str) else tuple(value)


def reasons() -> list[Reason]:
    """The rows of ``reasons/branches.toml`` for this torch; ValueError for a kind that there is not."""
    return [
        Reason(row["kind"], row["why"], *(several(row.get(key, "")) for key in ("in", "line", "target")))
        for row in rows_of(REASONS, "branch", KINDS, "in")
        if SpecifierSet(row.get("torch", "")).contains(importlib.metadata.version("torch"), prereleases=True)
    ]


def page(found: Sequence[Branch], rows: Sequence[Reason]) -> str:
    """The page of the branches that no item takes."""
    left = {one: next((row for row in rows if row.covers(one)), None) for one in found if not one.taken}
    marked = sum(row is not None for row in left.values())
    taken_, unmarked = sum(one.taken for one in found), len(found) - marked
    lines = ["# Branches that no item takes", ""]
    lines += [
        f"{taken_} of {len(found)} branches are taken; {marked} have a reason ({marked / len(found):.1%} of all); of "
        f"the others {taken_ / unmarked:.1%} are taken, and {len(left) - marked} are open.",
        "",
        "| module | branches | taken | with a reason | open |",
        "|---|--:|--:|--:|--:|",
    ]
    for module in dict.fromkeys(one.module for one in found):
        mine = [one for one in found if one.module == module]
        counts = [len(mine), sum(one.taken for one in mine), sum(left.get(one) is not None for one in mine)]
        lines.append(f"| `{module}` | {' | '.join(map(str, [*counts, counts[0] - counts[1] - counts[2]]))} |")
    for place, group in _by_place(left):
        lines += ["", f"## `{place}`", ""]
        for one in group:
            row = left[one]
            reason = "open" if row is None else f"{row.kind}: {row.why}"
            lines.append(f"- {one.start}: `{one.text}` to {one.end}: `{one.target}`. {reason}")
    for row in rows:
        # Each entry of a list by itself: one that a newer torch has made idle would hide beside the others.
        for part in row.parts():
            if not any(part.covers(one) for one in left):
                lines += ["", f"A row of {REASONS.name} covers nothing: {part}"]
    return "\n".join(lines) + "\n"


def _by_place(left: Iterable[Branch]) -> Iterator[tuple[str, list[Branch]]]:
    places = collections.defaultdict(list)
    for one in left:
        places[f"{one.module}:{one.function}"].append(one)
    yield from places.items()


def watched(folder: pathlib.Path, options: Sequence[str]) -> int:
    """Run the suites with the instruments; returns pytest's exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = instruments.environment(folder, "planted.coverage:branches", "planted.surface:calls")
    # The tracer in C: the one by events of the interpreter, the default of newer Pythons, has no contexts.
    environment = {**os.environ, "PYTHONPATH": run.search_path(), "COVERAGE_CORE": "ctrace", **chosen}
    command = [sys.executable, "-m", "pytest", "suites", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=run.ROOT, env=environment).returncode


@dataclasses.dataclass
class Items:
    """What is known of items, by their ids.

    Attributes:
        functions: those that each calls, as "module:qualified name".
        seconds: what each takes in a run without instruments; not of each it is known.
    """

    functions: dict[str, Collection[str]]
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: pathlib.Path) -> "Items":
        """Those of a map; ValueError, one line, if it cannot be read or is of another torch."""
        known = changed.read(path)
        if known.torch != installed():
            raise ValueError(f"{path}: it is of torch {known.torch}, and this is {installed()}")
        return cls(_by_item(known.items), _by_item(known.seconds))

    def write(self, path: pathlib.Path) -> None:
        """Write a map: names once, by item their numbers, and in the order of the items tenths of seconds, 0 unknown.

        Without the time of writing, so that equal maps are equal files.
        """
        names = sorted({name for found in self.functions.values() for name in found})
        numbers = {name: number for number, name in enumerate(names)}
        items = sorted(self.functions)
        content = {
            "torch": installed(),
            "functions": names,
            "items": {item: sorted(numbers[name] for name in self.functions[item]) for item in items},
            "tenths": [max(1, round(10 * self.seconds[item])) if item in self.seconds else 0 for item in items],
        }
        text = json.dumps(content, separators=(",", ":")) + "\n"
        path.write_bytes(gzip.compress(text.encode(), mtime=0))

    def onto(self, earlier: "Items") -> "Items":
        """These, after those of another map whose implementations have none here; its seconds stay."""
        mine = {_implementation(item) for item in self.functions}
        others = {item: one for item, one in earlier.functions.items() if _implementation(item) not in mine}
        return Items({**others, **self.functions}, {**earlier.seconds, **self.seconds})


def _by_item(known: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """What a map has by implementation and case, by the ids of items."""
    found = ((name, case, one) for name, cases in known.items() for case, one in cases.items())
    return {run.node_id({"id": case, "implementation": name}): one for name, case, one in found}


def _implementation(item: str) -> str:
    found = changed.ITEM.match(item)
    return found["implementation"] if found else ""


def timed(path: pathlib.Path, runs: Iterable[pathlib.Path]) -> int:
    """Write into a map what its items took in some runs, the last one that has an item; how many the map knows then."""
    items = Items.read(path)
    for file in runs:
        content: Any = door.content(file, is_journal=False)
        for case in content["cases"]:
            if not Verdict(case["verdict"]).is_skip:
                items.seconds[run.node_id(case)] = case["seconds"]
    items.write(path)
    return len(items.seconds.keys() & items.functions.keys())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites, or write what earlier runs have seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in ("run", "page"):
        commands.add_parser(name).add_argument("folder", type=pathlib.Path, metavar="FOLDER")
    onto = commands.choices["page"]
    onto.add_argument("--onto", type=pathlib.Path, metavar="MAP", help="another map, whose items come before")
    time = commands.add_parser("time")
    time.add_argument("map", type=pathlib.Path, metavar="MAP")
    time.add_argument("runs", type=pathlib.Path, nargs="+", metavar="RUN")
    options, others = parser.parse_known_args(arguments)
    if options.command == "run":
        return watched(options.folder, others)
    if others:
        parser.error(f"{options.command} takes no other options: {' '.join(others)}")
    try:
        if options.command == "time":
            print(f"{timed(options.map, options.runs)} items have their seconds")
            return 0
        saw = taken(options.folder)
        if not saw.items:
            raise ValueError(
                f"{options.folder} has no file of a watched run: python -m planted.coverage run {options.folder}"
            )
        items = Items(dict(saw.items))
        if options.onto:
            items = items.onto(Items.read(options.onto))
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    text = page(branches_of(saw.arcs), reasons())
    (options.folder / "branches.md").write_text(text)
    items.write(options.folder / changed.PACKED.name)
    lines = {"torch": installed(), "lines": comers(options.folder)}
    (options.folder / LINES).write_bytes(gzip.compress(json.dumps(lines).encode(), mtime=0))
    print(text.splitlines()[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
