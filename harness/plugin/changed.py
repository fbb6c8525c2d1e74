"""Which cases judge a change of what is tested: ``--changed`` and ``--changed-since``, by a map of items to functions.

``planted.coverage`` makes the map: for each item the functions of the implementation that its ranks called. A change
is a set of functions. Where the map does not know a function, as one that is new, all items count that call any
function of its module; of a module that it does not know, the chapters that import it.

The items that call what was changed run in an order, until ``--seconds`` are over; the rest is left out of the run,
with that reason. The order (:func:`ordered`) is that in which ``planted.mutants`` runs items, too.
"""

import ast
import collections
import dataclasses
import functools
import heapq
import importlib.util
import pathlib
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import pytest

from shardproof import door, renamed
from shardproof.harness.plugin import cases, packaged
from shardproof.harness.plugin.selection import Selection
from shardproof.runfile import SPENT

PACKED = pathlib.Path(__file__).parents[2] / "functions.json.gz"
"""The map that this shardproof has."""

ITEM = re.compile(r"^(?P<case>[^\[]+)\[(?P<implementation>.+?)-(?P<rest>w\d.*)\]$", re.DOTALL)
"""The id of an item, with the case and the implementation."""

_T = TypeVar("_T")
_HUNK = re.compile(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@")


@dataclasses.dataclass(frozen=True)
class Map:
    """Which functions each item calls.

    Attributes:
        torch: the version with which it was made.
        items: by implementation and id of the case, the functions, as "module:qualified name".
        seconds: what items took in a run without instruments, of those of which it is known.
    """

    torch: str
    items: Mapping[str, Mapping[str, frozenset[str]]]
    seconds: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def functions(self) -> frozenset[str]:
        return frozenset().union(*(called for same in self.items.values() for called in same.values()))

    @functools.cached_property
    def modules(self) -> frozenset[str]:
        return frozenset(name.partition(":")[0] for name in self.functions)

    def called_by(self, implementation: str, case: str) -> frozenset[str]:
        """What an item calls; of an implementation that the map lacks, what the case calls with any that it has."""
        mine = self.items.get(implementation)
        if mine is not None:
            return mine.get(case, frozenset())
        return frozenset().union(*(same.get(case, frozenset()) for same in self.items.values()))

    def seconds_of(self, implementation: str, case: str) -> float:
        """What an item takes; where that is not known, what its test function takes, and else a second."""
        mine = self.seconds.get(implementation, {}).get(case)
        return self._of_functions.get(case.partition("[")[0], 1.0) if mine is None else mine

    @functools.cached_property
    def _of_functions(self) -> dict[str, float]:
        found: dict[str, list[float]] = collections.defaultdict(list)
        for same in self.seconds.values():
            for case, seconds in same.items():
                found[case.partition("[")[0]].append(seconds)
        return {function: statistics.median(several) for function, several in found.items()}


def read(path: pathlib.Path) -> Map:
    """Read a map.

    Raises:
        ValueError: it cannot be read, or is none; one line.
    """
    try:
        content: Any = door.content(path, is_journal=False)
        names = content["functions"]
        items: dict[str, dict[str, frozenset[str]]] = collections.defaultdict(dict)
        seconds: dict[str, dict[str, float]] = collections.defaultdict(dict)
        tenths = content.get("tenths") or [0] * len(content["items"])
        for (item, numbers), tenth in zip(content["items"].items(), tenths, strict=True):
            if found := ITEM.match(item):
                case = renamed.item(f"{found['case']}[{found['rest']}]")
                items[found["implementation"]][case] = frozenset(names[number] for number in numbers)
                if tenth:
                    seconds[found["implementation"]][case] = tenth / 10
        return Map(content["torch"], items, seconds)
    except (OSError, RecursionError, ValueError, KeyError, TypeError, IndexError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else f"it is none ({error!r})"
        raise ValueError(f"the map {path} cannot be read: {why}; python -m planted.coverage page makes one") from None


@dataclasses.dataclass(frozen=True)
class Change:
    """What was changed.

    Attributes:
        functions: functions that the map knows.
        modules: modules that it knows, of which any function counts.
        chapters: the names of files of cases of which each item counts.
        lines: what the run tells of it.
    """

    functions: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    chapters: frozenset[str] = frozenset()
    lines: tuple[str, ...] = ()

    def touches(self, called: Iterable[str]) -> bool:
        """Whether any of these functions was changed."""
        return any(one in self.functions or one.partition(":")[0] in self.modules for one in called)


def find(selection: Selection, known: Map) -> Change:
    """Return what the options of a run say was changed.

    Raises:
        ValueError: a file or a function cannot be one that was changed, or git has no such revision. One line.
    """
    places = [_given(text, known) for text in selection.changed]
    if selection.changed_since:
        places += _since(selection.changed_since, known)
    functions, modules, chapters, lines = set[str](), set[str](), set[str](), []
    for module, name in dict.fromkeys(places):
        inside = [one for one in known.functions if one == f"{module}:{name}" or one.startswith(f"{module}:{name}.")]
        if name and inside:
            functions.update(inside)
        elif module in known.modules:
            modules.add(module)
            if name:
                lines.append(f"the map does not know {module}:{name}: all that call its module count")
        else:
            importing = _chapters_with(module)
            chapters |= importing
            listed = ", ".join(sorted(importing)) or "no chapter imports it"
            lines.append(f"the map does not know the module {module}: {listed}")
    what = [*sorted(one.partition(":")[2] for one in functions), *(f"any of {one}" for one in sorted(modules))]
    shown = ", ".join(what[:4]) + (f" and {len(what) - 4} others" if len(what) > 4 else "")
    if what:
        lines.insert(0, f"{shown} (map of torch {known.torch})")
    return Change(frozenset(functions), frozenset(modules), frozenset(chapters), tuple(lines))


def _given(text: str, known: Map) -> tuple[str, str]:
    """The module and the function of ``FILE[:FUNCTION]``; "" for the whole file."""
    file, _, name = text.partition(":")
    if not file.endswith(".py"):
        raise ValueError(f"--changed {text}: expected FILE.py or FILE.py:Class.function, such as _fsdp_param.py")
    path = pathlib.PurePath(file)
    found = [module for module in sorted(known.modules) for own in _files(module) if _is_end(path, own)]
    if len(found) > 1:
        raise ValueError(f"--changed {text}: it may be {' or '.join(found)}; give more of its path")
    if found:
        return found[0], name
    if "torch" not in path.parts:
        raise ValueError(f"--changed {text}: the map has no such file, and its path names no module of torch")
    begin = len(path.parts) - 1 - path.parts[::-1].index("torch")
    return _module(pathlib.PurePath(*path.parts[begin:])), name


def _module(path: pathlib.PurePath) -> str:
    """The name of the module of a path that begins with its package."""
    return ".".join(one for one in path.with_suffix("").parts if one != "__init__")


def _files(module: str) -> Iterator[pathlib.PurePath]:
    path = pathlib.PurePath(*module.split("."))
    yield from (path.with_suffix(".py"), path / "__init__.py")


def _is_end(one: pathlib.PurePath, other: pathlib.PurePath) -> bool:
    """Whether one path is the end of the other."""
    shorter, longer = sorted((one.parts, other.parts), key=len)
    return longer[-len(shorter) :] == shorter


def _chapters_with(module: str) -> set[str]:
    """The names of the files of cases that import a module, by themselves or by what they share with others."""
    imported = {path: _imported(path) for path in packaged.SUITES.glob("*.py")}
    wanted, found = {module}, set[pathlib.Path]()
    while more := {path for path, names in imported.items() if path not in found and names & wanted}:
        found |= more
        wanted |= {f"shardproof.suites.{path.stem}" for path in more}
    return {path.name for path in found if path.name.startswith("test_")}


def _imported(path: pathlib.Path) -> set[str]:
    """The names of modules that a file imports, and of what it imports from them."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update([node.module, *(f"{node.module}.{one.name}" for one in node.names)])
    return names


def _since(revision: str, known: Map) -> Iterator[tuple[str, str]]:
    """The functions that torch's checkout has changed since a revision; "" where a line is in none."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    package = pathlib.Path(spec.origin).resolve().parent
    command = [
        "git",
        "-C",
        str(package),
        "diff",
        "-U0",
        "--no-color",
        "--no-ext-diff",
        "--relative",
        revision,
        "--",
        ".",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise ValueError(f"--changed-since {revision}: git cannot be run ({error.strerror})") from None
    if done.returncode:
        why = (done.stderr.strip() or "git failed").splitlines()[0]
        raise ValueError(f"--changed-since {revision}: {why} (in {package}, where torch is imported from)")
    for file, lines in _hunks(done.stdout):
        path = package / file
        if path.suffix != ".py" or not path.is_file():  # what is no Python has no functions here
            continue
        module = ".".join(
            ["torch", *(one for one in pathlib.PurePath(file).with_suffix("").parts if one != "__init__")]
        )
        for line in lines:
            names = _around(path, line)
            yield (
                module,
                next((one for one in names if f"{module}:{one}" in known.functions), names[0] if names else ""),
            )


def _hunks(diff: str) -> Iterator[tuple[str, list[int]]]:
    """By changed file, the lines of the new source that were changed; one that is followed by what was taken out."""
    file, lines = "", list[int]()
    for text in diff.splitlines():
        if text.startswith("+++ "):
            if file:
                yield file, lines
            file, lines = text[4:].removeprefix("b/"), []
        elif found := _HUNK.match(text):
            begin, count = int(found[1]), int(found[2] or 1)
            lines += range(begin, begin + max(1, count))
    if file:
        yield file, lines


@functools.cache
def functions_in(path: pathlib.Path) -> list[tuple[int, int, str]]:
    """The functions of a source file, outer ones first.

    Of each the first line, that of a decorator if it has one, the last line and the qualified name.
    """
    found: list[tuple[int, int, str]] = []

    def walk(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if not isinstance(child, ast.ClassDef):
                    first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                    found.append((first, child.end_lineno or first, f"{outer}{child.name}"))
                walk(child, f"{outer}{child.name}.")
            else:
                walk(child, outer)

    walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def _around(path: pathlib.Path, line: int) -> list[str]:
    """The functions around a line, the innermost first."""
    return [name for first, last, name in reversed(functions_in(path)) if first <= line <= last]


def ordered(items: Iterable[pytest.Function], change: Change, known: Map) -> list[pytest.Function]:
    """Return those items that call what was changed, the likeliest finders first.

    Chapters take turns, because of what every step calls each chapter sees another side. Every second item is one whose
    chapter or test function has a word of a changed function in its name, as long as there are any. In both kinds those
    chapters begin of which a greater share calls what was changed, and in a chapter one item of each test function
    comes before a second one of any. Last are items whose worlds each execute a new interpreter or the like.
    """
    found: dict[tuple[str, str, str], list[tuple[int, int, pytest.Function]]] = collections.defaultdict(list)
    called_in, all_in = collections.Counter[str](), collections.Counter[str]()
    for item in items:
        implementation, case = cases.launch_of(item).implementation, cases.case_id(item)
        called = known.called_by(implementation, case)
        chapter = item.path.name
        all_in[chapter] += bool(called)
        if change.touches(called) or chapter in change.chapters:
            called_in[chapter] += 1
            place = chapter, item.function.__name__, implementation
            found[place].append((cases.launch_of(item).size, len(called), item))
    share = {chapter: called_in[chapter] / max(1, all_in[chapter]) for chapter in called_in}
    words = frozenset[str]().union(*(_words(re.split("[:.]", name)[-1]) for name in change.functions))
    by_chapter: dict[tuple[bool, str], list[list[pytest.Function]]] = collections.defaultdict(list)
    for place, same in found.items():
        # Few ranks first, and of as many ranks the item that calls the least besides: more of them fit into the time.
        mine = [item for *_, item in sorted(same, key=lambda one: one[:2])]
        by_chapter[bool(words & _words("_".join(place[:2]))), place[0]].append(mine)
    chapters = sorted(by_chapter, key=lambda key: -share[key[1]])

    def seconds(item: pytest.Function) -> float:
        return known.seconds_of(cases.launch_of(item).implementation, cases.case_id(item))

    kinds = (
        in_turn([in_turn(by_chapter[key]) for key in chapters if key[0] is is_named], seconds)
        for is_named in (True, False)
    )
    turns = in_turn(kinds, seconds)
    return sorted(turns, key=lambda item: any(mark.kwargs for mark in item.iter_markers("world")))


def in_turn(lists: Iterable[list[_T]], seconds: Callable[[_T], float] = lambda item: 1.0) -> list[_T]:
    """The first of each list, then the second of each, and so on.

    With ``seconds``, the lists take turns by time: next is the item until whose end its list has taken the least. One
    of ten seconds comes when each other list has had ten.
    """
    found, several = list[_T](), list(lists)
    heap = [(seconds(one[0]), number, 0) for number, one in enumerate(several) if one]
    heapq.heapify(heap)
    while heap:
        taken, number, place = heap[0]
        found.append(several[number][place])
        if place + 1 < len(several[number]):
            heapq.heapreplace(heap, (taken + seconds(several[number][place + 1]), number, place + 1))
        else:
            heapq.heappop(heap)
    return found


@functools.cache
def _words(name: str) -> frozenset[str]:
    """The beginnings of the longer words of a name, such as "redu" of "reduce" and "reduction"."""
    return frozenset(one[:4] for one in re.findall(r"[a-z]{4,}", name)) - {"para", "test", "modu"}


def one_at_a_time(config: pytest.Config) -> None:
    """Have xdist hand out items one by one: a worker that begins with a long piece would run what should come late."""
    if getattr(config.option, "maxschedchunk", 0) is None:
        config.option.maxschedchunk = 1


class Ending:
    """A plugin that leaves out the cases for which no time is left.

    The time begins with the first case of the process, as a change is judged from there on; that of a run of profiles
    began with the run, which is to end in time.
    """

    def __init__(self, selection: Callable[[], Selection], clock: Callable[[], float] = time.monotonic) -> None:
        self._selection, self._clock = selection, clock
        self._began = clock()
        self._end: float | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Called by pytest."""
        if not cases.is_case(item):
            return
        chosen, now = self._selection(), self._clock()
        if self._end is None:
            self._end = (self._began if chosen.profile else now) + chosen.seconds
        if now >= self._end:
            pytest.skip(f"{SPENT} {chosen.seconds:g} are over")


def not_run(left_out: Iterable[Mapping[str, str]]) -> int:
    """The number of cases that were left out because the time was over."""
    return sum(one["reason"].startswith(SPENT) for one in left_out)
