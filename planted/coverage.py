"""Measures which branches of an implementation's Python the suites take, and which items call which of its functions.

    python -m planted.coverage run FOLDER [--impl torch.fully_shard,torch.fsdp] [options of pytest]
    python -m planted.coverage page FOLDER [--check]

``run`` runs the suites with :func:`branches` as an instrument of each rank: coverage's C tracer begins with the first
case of a process, after the fork, and each item leaves a line in a file of its process. A rank that is killed loses the
item that it ran alone. Several runs may fill one folder. ``page`` writes ``docs/branches.md``: the branches that no item
takes, by function, with the reason from ``branches.toml``, or "open".

Branches of the modules themselves are left out: they run when torch is imported, before a rank is forked.
"""

import argparse
import ast
import collections
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from planted import run

#: The modules that are measured, as prefixes of modules: those that the contract is about.
MEASURED = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed._state_dict_utils",
)

Arc = tuple[int, int]


@functools.cache
def measured() -> dict[str, pathlib.Path]:
    """The files that are measured, by the names of their modules."""
    found = {}
    for name in MEASURED:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, f"{name} is no module of this torch"
        if not spec.submodule_search_locations:
            found[name] = pathlib.Path(spec.origin)
            continue
        folder = pathlib.Path(spec.origin).parent
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
    for path in sorted(folder.glob("*.branches")):
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            for module, arcs in line["arcs"].items():
                found.arcs[module] |= {(start, end) for start, end in arcs}
            for module, starts in line["entered"].items():
                names = functions(module)
                found.items[line["item"]] |= {f"{module}:{names[start]}" for start in starts if start in names}
    return found


@functools.cache
def functions(module: str) -> dict[int, str]:
    """The qualified names of a module's functions, by the line with which their code begins (a decorator's, too)."""
    names: dict[int, str] = {}

    def walk(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    names[min([child.lineno, *(one.lineno for one in child.decorator_list)])] = name
                walk(child, f"{name}.")
            else:
                walk(child, outer)

    walk(ast.parse(measured()[module].read_text()), "")
    return names


def branches_of(arcs: dict[str, set[Arc]]) -> list[Branch]:
    """All branches of the functions of the measured modules, as coverage finds them in the source."""
    import coverage

    paths = measured()
    with tempfile.TemporaryDirectory() as folder:
        data = coverage.CoverageData(f"{folder}/data")
        data.add_arcs({str(paths[name]): sorted(found) for name, found in arcs.items()})
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
