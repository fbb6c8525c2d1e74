"""Which of the selected cases a shorter run leaves out: ``--effort quick``, ``standard`` or ``full``.

- ``full`` leaves out nothing.
- ``standard`` keeps of each case every pair of values of its parameters, every number of ranks, and the combinations
  that the table ``standard.toml`` next to the case lists. What it keeps is the same for every host and
  implementation.
- ``quick`` keeps one item of each function for each implementation, so that every requirement has one, and of each
  value of the parameters that ``each_value`` names.

The effort is applied last, to what ``--world``, ``-k``, ``-m`` and other plugins have selected, so that what they
exclude covers nothing. An item that the command line names by its node id is always kept.

Whatever the effort, one item of each function runs first.
"""

import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from shardproof import contract, door
from shardproof.harness.plugin import cases
from shardproof.harness.plugin.progress import Progress
from shardproof.harness.plugin.selection import Effort, Selection
from shardproof.harness.plugin.state import State
from shardproof.runfile import Verdict

# Chooses few of the combinations of a case's parameters, which together have every pair of values.
#
# Nothing here depends on pytest, on the host or on the implementation under test. Combinations differ in what they need
# (capabilities, hardware, ranks), and hosts and implementations differ in what they have. A pair of values is therefore
# covered once for each least set of needs among the combinations that have it: whoever can run any combination with the
# pair can run a chosen one.

Part = frozenset[tuple[str, str]]
"""Some parameters with their values, as (name, text of the value)."""

WORLD = "world"
"""The name of the number of ranks in a part."""


@dataclasses.dataclass(frozen=True)
class Combination:
    """The parameters of one item of a case, and what it needs.

    Attributes:
        values: the text of each parameter's value, by name. Values are equal if their texts are.
        size: the number of ranks, which is a value too and must be there.
        needs: names of what else must be there for the item to run.
    """

    values: Mapping[str, str]
    size: int
    needs: frozenset[str] = frozenset()

    def parts(self) -> Iterator[Part]:
        """What should be covered: each pair of values, a single parameter's value, and the number of ranks."""
        yield frozenset({(WORLD, repr(self.size))})
        yield from map(frozenset, itertools.combinations(self.values.items(), min(2, len(self.values))))

    def has(self, part: Part) -> bool:
        """Return whether the combination has these values."""
        return part <= self.values.items() | {(WORLD, repr(self.size))}

    def is_easier_than(self, other: "Combination") -> bool:
        """Return whether whoever can run ``other`` can run this one as well, but not the reverse."""
        here, there = (self.size, self.needs), (other.size, other.needs)
        return self.size <= other.size and self.needs <= other.needs and here != there


def cover(combinations: Sequence[Combination], *, always: Iterable[Part] = ()) -> list[int]:
    """Choose combinations that have every pair of values, and every number of ranks, that any combination has.

    The choice is greedy: the next combination is the one with most of what is not covered yet; of several, one with the
    fewest ranks; of several, the first. It depends on the arguments alone, and so on the order of the combinations.

    ``always`` has further sets of values to cover, such as the combinations of a seed test. A set that no combination
    has is ignored. Returns the chosen positions in ascending order.
    """
    parts = {part for combination in combinations for part in combination.parts()} | set(always)
    groups = [group for part in parts for group in _easiest(combinations, part)]
    uncovered = collections.Counter(index for group in groups for index in group)
    chosen = []
    while groups:
        best = min(uncovered, key=lambda index: (-uncovered[index], combinations[index].size, index))
        chosen.append(best)
        for group in groups:
            if best in group:
                uncovered.subtract(group)
        groups = [group for group in groups if best not in group]
    return sorted(chosen)


def _easiest(combinations: Sequence[Combination], part: Part) -> Iterator[list[int]]:
    """For each least set of needs with which a combination has these values, the positions of all such combinations."""
    found = [index for index, combination in enumerate(combinations) if combination.has(part)]
    groups: dict[tuple[int, frozenset[str]], list[int]] = collections.defaultdict(list)
    for index in found:
        one = combinations[index]
        if not any(combinations[other].is_easier_than(one) for other in found):
            groups[one.size, one.needs].append(index)
    yield from groups.values()


# Combinations of parameters that ``--effort standard`` always keeps, from ``standard.toml`` beside the cases.
#
# An entry is a product of values of some parameters of one case; other parameters may have any value::
#
#     [[always]]
#     case = "test_tied.py::test_tied_embedding"
#     world = [4]
#     recomputes = [false, true]
#
# ``world`` is the number of ranks, a tuple is written as a list, a class as its name, and None as "None". ``seed``,
# a text, names the test of torch that an entry stands for, and the table ``seeds`` says how many combinations each of
# these ran: nothing here reads them.
#
# A combination without an item is no error here: ``--world`` and ``-k`` may have left the item out. For ``suites/``,
# ``tests/test_seeds.py`` refuses it.

TABLE = "standard.toml"
"""The name of the file."""


def text(value: Any) -> str:
    """Return the text of a parameter's value by which values are compared; lists and tuples are the same."""
    return repr(_as_in_toml(value))


def _as_in_toml(value: Any) -> Any:
    if isinstance(value, type):
        return value.__name__
    return [_as_in_toml(one) for one in value] if isinstance(value, (list, tuple)) else value


def read(folder: pathlib.Path) -> Mapping[str, list[Part]]:
    """Return the combinations of each case of a folder, ``<file>::<function>``; a folder without a table has none.

    Raises:
        ValueError: the table is not valid. The message is one line that names the file.
    """
    path = folder / TABLE
    if not path.is_file():
        return {}
    document = door.toml(path)
    entries, _ = document.pop("always", []), document.pop("seeds", {})
    if document or not isinstance(entries, list):
        raise ValueError(f"{path}: entries are [[always]], and there is nothing else but seeds")
    found: dict[str, list[Part]] = {}
    for number, entry in enumerate(entries, start=1):
        case = entry.pop("case", None) if isinstance(entry, dict) else None
        if case and isinstance(entry.get("seed"), str):
            del entry["seed"]
        if not isinstance(case, str) or not all(isinstance(values, list) for values in entry.values()):
            raise ValueError(f"{path} entry {number}: expected a case and lists of values of its parameters")
        found.setdefault(case, []).extend(product(entry))
    return found


def product(axes: Mapping[str, list[Any]]) -> Iterator[Part]:
    """Return the combinations of lists of values, as the table has them, by the names of their parameters."""
    for values in itertools.product(*axes.values()):
        yield frozenset((name, text(_with_none(value))) for name, value in zip(axes, values, strict=True))


def _with_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_none(one) for one in value]
    return None if value == "None" else value


# Chooses what ``--effort quick`` runs: one item of each function, or of each thing that its values name.
#
# Depends on neither pytest nor torch.


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One item of an implementation.

    Attributes:
        function: the name of its test function, in the file.
        runs: whether the host and the implementation have what it needs.
        is_meant: whether its parameters mean something of their own on so few ranks.
        values: the values of its parameters, by name, as texts.
        places: the places of these values in the lists of the case.
        size: the number of ranks.
        apart: the values that name what it checks, where the function checks different things.
    """

    file: str
    function: str
    requirements: tuple[str, ...]
    runs: bool = True
    is_meant: bool = True
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    places: tuple[int, ...] = ()
    size: int = 1
    apart: tuple[str, ...] = ()

    def values_in_file(self) -> list[tuple[str, str, str]]:
        """The values of its parameters and its number of ranks, in its file."""
        return [(self.file, name, value) for name, value in (*self.values.items(), (WORLD, repr(self.size)))]


def choose_quick(candidates: Sequence[Candidate]) -> list[int]:
    """Choose one item of each function that can run, so that every requirement has one; return ascending positions.

    A function whose values name different things (``apart``) counts as one function for each of them.

    - Functions choose in the order of the candidates. A function of which no item can run has none, unless it is the
      first of a requirement of which nothing can run: the verdict then says what is missing.
    - Of a function's items it takes the one whose values were taken least often in this file, so that the cases of a
      chapter have them in turn; of several, the one whose values stand last in their lists, because lists begin with
      what is plain and end with what is special; of several, the one with the fewest ranks.
    """
    can_run = {name for candidate in candidates if candidate.runs for name in candidate.requirements}
    functions: dict[tuple[str, ...], list[int]] = {}
    for index, candidate in enumerate(candidates):
        functions.setdefault((candidate.file, candidate.function, *candidate.apart), []).append(index)
    chosen = []
    used: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for items in functions.values():
        asked = {name for index in items for name in candidates[index].requirements}
        choices = [index for index in items if candidates[index].runs] or ([] if asked <= can_run else items)
        if choices:
            best = min(choices, key=lambda index: _rank(candidates[index], used))
            chosen.append(best)
            used.update(candidates[best].values_in_file())
            can_run |= asked
    return sorted(chosen)


def _rank(one: Candidate, used: collections.Counter[tuple[str, str, str]]) -> tuple[bool, int, tuple[int, ...], int]:
    times = sum(used[value] for value in one.values_in_file())
    return not one.is_meant, times, tuple(-place for place in one.places), one.size


# Orders cases so that a failure shows early, worlds are started seldom and workers wait for each other seldom.


def order(items: list[pytest.Item], selection: Selection, *, first: Container[pytest.Item]) -> None:
    """Put the cases of an implementation that has worlds of its own together, and those that want to be alone last.

    Of an implementation one case of each function, those in ``first``, comes before a second one of any. In the order
    of the files a bug that the last chapter alone finds showed after the whole run, and a run that is stopped had not
    looked at some chapters at all.

    A process keeps a few worlds. With more implementations than that, of which each needs its own, cases in the order
    of the suites start a world each: of 13 implementations on two GPUs a quarter was done in 450 s, most of it starts.
    A case that shares its devices with no other waits for all workers, which wait for it in turn; at the end none does.

    Otherwise the order is that of the suites, also of items that are not cases. Implementations whose worlds are shared
    stay side by side, because they share baselines as well.
    """
    apart = [name for name, kind in selection.implementations.items() if kind.traits.isolation != "shared"]

    def place(item: pytest.Item) -> tuple[bool, int, bool]:
        if not cases.is_case(item):
            return False, 0, False
        implementation = cases.launch_of(item).implementation
        block = 1 + apart.index(implementation) if implementation in apart else 0
        return item.get_closest_marker("alone") is not None, block, item not in first

    items.sort(key=place)


_NOT_MEANT = "more ranks, to mean something of its own"
_SKIPPED = "no mark that skips it"


class Shortening:
    """A plugin that deselects what the effort of the run leaves out, and puts the rest in the order in which it runs.

    It does so after all plugins that select.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Called by pytest."""
        functions = [item for item in items if cases.is_case(item)]
        if not functions:
            return
        try:
            kept = self._kept(functions, config)
            first = set(choose(kept, self._state.selection, Effort.QUICK))
        except ValueError as error:
            self._state.refuse(config, items, [str(error)])
            return
        if spared := set(functions) - kept:
            self._state.spared = [item for item in functions if item in spared]
            config.hook.pytest_deselected(items=self._state.spared)
            items[:] = [item for item in items if item not in spared]
        order(items, self._state.selection, first=first)

    def _kept(self, functions: list[pytest.Function], config: pytest.Config) -> set[pytest.Function]:
        selection = self._state.selection
        if selection.profile or selection.contract:
            ids: Container[str] = contract.items()
            if selection.profile:
                ids = contract.items_of_profile(selection.profile, selection.hardware_class)
            return {item for item in functions if cases.case_id(item) in ids}
        if selection.effort == Effort.FULL:
            return set(functions)
        kept = set(_named(functions, config))
        return kept.union(choose([item for item in functions if item not in kept], selection, selection.effort))


def lines(selection: Selection, progress: Progress) -> list[str]:
    """Return which effort was run and what it left out, or how far each implementation is from the profile that ran."""
    if not selection.profile:
        return [_summary(selection.effort, progress)]
    name, hardware = selection.profile, selection.hardware_class
    number = len(contract.items_of_profile(name, hardware))
    return [
        f"profile {name} on {hardware}: {one} passed {progress.verdicts[one, Verdict.PASS]} of {number} items, "
        f"in {progress.seconds[one]:.0f} s of cases"
        for one in selection.implementations
    ]


def _summary(effort: Effort, progress: Progress) -> str:
    counts: collections.Counter[str] = collections.Counter()
    for files in progress.spared.values():
        counts.update({pathlib.PurePath(file).stem.removeprefix("test_"): count for file, count in files.items()})
    if not counts:
        return f"effort {effort}: all cases"
    files_of = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"effort {effort}: {counts.total()} of {counts.total() + progress.count} cases left out: {files_of}"


def choose(items: Iterable[pytest.Function], selection: Selection, effort: Effort) -> Iterator[pytest.Function]:
    """Return the cases that an effort but ``full`` keeps.

    Raises:
        ValueError: a table of combinations is not valid. The message is one line.
    """
    by_implementation: dict[str, list[pytest.Function]] = collections.defaultdict(list)
    for item in sorted(items, key=_order):
        by_implementation[cases.launch_of(item).implementation].append(item)
    for same in by_implementation.values():
        if effort == Effort.QUICK:
            chosen = choose_quick([_candidate(item, selection) for item in same])
        else:
            chosen = _every_pair(same)
        yield from (same[index] for index in chosen)


def _named(items: Iterable[pytest.Function], config: pytest.Config) -> Iterator[pytest.Function]:
    """The items that the command line names by their node ids, with parameters."""
    here = config.invocation_params.dir
    given = (argument.partition("::") for argument in config.args)
    names = {((here / path).resolve(), name) for path, _, name in given if name}
    return (item for item in items if (item.path.resolve(), item.name) in names)


def _order(item: pytest.Function) -> tuple[Any, ...]:
    """Order items as they are written, and those of one function by parameters and then by ranks."""
    return item.path, item.location[1] or 0, _places(item), cases.launch_of(item).size


def _function(item: pytest.Function) -> tuple[pathlib.Path, str]:
    return item.path, item.function.__name__


def _candidate(item: pytest.Function, selection: Selection) -> Candidate:
    path, function = _function(item)
    needs = _needs(item)
    values = _values(item)
    return Candidate(
        file=str(path),
        function=function,
        # A case without a requirement has one of its own.
        requirements=cases.requirements(item) or (f"{path}::{function}",),
        runs=_SKIPPED not in needs and cases.missing(item, selection) is None,
        is_meant=_NOT_MEANT not in needs,
        values=values,
        places=_places(item),
        size=cases.launch_of(item).size,
        apart=tuple(values[name] for name in _apart(item, values)),
    )


def _apart(item: pytest.Function, values: Mapping[str, str]) -> Iterator[str]:
    """The names of the parameters whose values name different things."""
    for mark in item.iter_markers("each_value"):
        if unknown := [name for name in mark.args if name not in values]:
            known = ", ".join(values) or "none"
            raise ValueError(f"{item.nodeid}: each_value({unknown[0]!r}) names no parameter; the case has {known}")
        yield from mark.args


def _every_pair(items: Sequence[pytest.Function]) -> list[int]:
    tables = {folder: read(folder) for folder in {item.path.parent for item in items}}
    chosen: list[int] = []
    begin = 0
    for (path, name), same in itertools.groupby(items, key=_function):
        combinations = [Combination(_values(item), cases.launch_of(item).size, _needs(item)) for item in same]
        listed = tables[path.parent].get(f"{path.name}::{name}", ())
        chosen += (begin + index for index in cover(combinations, always=listed))
        begin += len(combinations)
    return chosen


def _values(item: pytest.Function) -> dict[str, str]:
    return {name: text(value) for name, value in item.callspec.params.items() if name != "rank"}


def _places(item: pytest.Function) -> tuple[int, ...]:
    return tuple(index for name, index in item.callspec.indices.items() if name != "rank")


def _needs(item: pytest.Function) -> frozenset[str]:
    """What must be there for an item to run and to mean what its parameters do."""
    needs = {str(name) for mark in item.iter_markers("needs") for name in mark.args}
    if any(mark.args[0] > cases.launch_of(item).size for mark in item.iter_markers("meaningful_from")):
        needs.add(_NOT_MEANT)
    if any(mark.name in ("skip", "skipif") for mark in item.iter_markers()):
        needs.add(_SKIPPED)
    return frozenset(needs)
