"""Which of the selected cases a shorter run leaves out: ``--effort quick``, ``standard`` or ``full``.

- ``full`` leaves out nothing.
- ``standard`` keeps of each case every pair of values of its parameters, every number of ranks, and the combinations
  that the table ``standard.toml`` next to the case lists. What it keeps is the same for every host and
  implementation.
- ``quick`` keeps one item of each function for each implementation, so that every requirement has one, and of each
  value of the parameters that ``each_value`` names.

The effort is applied last, to what ``--world``, ``-k``, ``-m`` and other plugins have selected, so that what they
exclude covers nothing. An item that the command line names by its node id is always kept.

Whatever the effort, one item of each function runs first; of profiles, ``breadth`` has the order.
"""

import collections
import itertools
import pathlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from shardproof import contract
from shardproof.harness.plugin import breadth, cases, changed, pairs, quick, standard
from shardproof.harness.plugin.options import Effort
from shardproof.harness.plugin.progress import Progress
from shardproof.harness.plugin.selection import Selection
from shardproof.harness.plugin.state import State
from shardproof.runfile import SPENT, tally


def order(items: list[pytest.Item], selection: Selection, *, turns: Mapping[pytest.Function, int]) -> None:
    """Put the cases of an implementation that has worlds of its own together, and those that want to be alone last.

    Of an implementation one case of each function, by ``turns``, comes before a second one of any. In the order
    of the files a bug that the last chapter alone finds showed after the whole run, and a run that is stopped had not
    looked at some chapters at all. In a run of profiles, whose time may be over, a turn is that of all implementations.

    A process keeps a few worlds. With more implementations than that, of which each needs its own, cases in the order
    of the suites start a world each: of 13 implementations on two GPUs a quarter was done in 450 s, most of it starts.
    A case that shares its devices with no other waits for all workers, which wait for it in turn; at the end none does.

    Otherwise the order is that of the suites, also of items that are not cases. Implementations whose worlds are shared
    stay side by side, because they share baselines as well.
    """
    apart = [name for name, kind in selection.implementations.items() if kind.traits.isolation != "shared"]

    def place(item: pytest.Item) -> tuple[int, int, int]:
        if not cases.is_case(item):
            return 0, 0, 0
        implementation = cases.launch_of(item).implementation
        block = 1 + apart.index(implementation) if implementation in apart else 0
        alone = int(item.get_closest_marker("alone") is not None)
        return (turns[item], alone, block) if selection.profile else (alone, block, turns[item])

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
            first = set() if self._state.change else set(choose(kept, self._state.selection, Effort.QUICK))
            turns = self._turns([item for item in functions if item in kept], first)
        except ValueError as error:
            self._state.refuse(config, items, [str(error)])
            return
        if self._state.change:
            known, change = self._state.change
            calling = changed.ordered((item for item in functions if item in kept), change, known)
            items[:] = [*calling, *(item for item in items if not cases.is_case(item))]
            self._spare(set(functions) - set(calling), functions, config)
            return
        self._spare(set(functions) - kept, functions, config)
        items[:] = [*(item for item in items if not cases.is_case(item)), *turns]
        order(items, self._state.selection, turns=turns)

    def _turns(self, kept: list[pytest.Function], first: set[pytest.Function]) -> Mapping[pytest.Function, int]:
        """The turn of each case that runs, in the order of the files or, of profiles, in that of their chapters."""
        chosen = self._state.selection
        if not chosen.profile:
            return {item: int(item not in first) for item in kept}
        wanted = frozenset[str]().union(*(contract.profiles()[name].requirements for name in chosen.profile))
        return breadth.ordered(kept, chosen, changed.read(changed.PACKED), wanted=wanted, first=first)

    def _spare(
        self, spared: set[pytest.Function], functions: list[pytest.Function], config: pytest.Config
    ) -> set[pytest.Function]:
        """Deselect cases, and note them in the order of the files."""
        if spared:
            self._state.spared = [item for item in functions if item in spared]
            config.hook.pytest_deselected(items=self._state.spared)
        return spared

    def _kept(self, functions: list[pytest.Function], config: pytest.Config) -> set[pytest.Function]:
        selection = self._state.selection
        if selection.profile or selection.contract:
            ids: Container[str] = contract.items()
            if selection.profile:
                ids = set[str]().union(*_items(selection).values())
            return {item for item in functions if cases.case_id(item) in ids}
        if selection.effort == Effort.FULL:
            return set(functions)
        kept = set(_named(functions, config))
        return kept.union(choose([item for item in functions if item not in kept], selection, selection.effort))


def lines(selection: Selection, progress: Progress, change: changed.Change | None) -> list[str]:
    """Return what was run of what could be, and what was left out: of an effort, of a profile, of a change."""
    if change is not None:
        left = changed.not_run(progress.left_out) + len(progress.missing)  # the latter of a run that was ended early
        what = f"{progress.count} cases call what was changed, {progress.count - left} ran in {selection.seconds:g} s"
        return [*change.lines, f"{what}, {left} were not run" if left else f"{what}: all of them"]
    if not selection.profile:
        return [_summary(selection.effort, progress)]
    return [
        _figures(name, ids, one, selection, progress)
        for name, ids in _items(selection).items()
        for one in selection.implementations
    ]


def _items(selection: Selection) -> dict[str, frozenset[str]]:
    """By profile of the run, the ids of the items that its hardware can have."""
    return {name: contract.items_of_profile(name, selection.hardware_class) for name in selection.profile}


def _figures(profile: str, ids: frozenset[str], name: str, selection: Selection, progress: Progress) -> str:
    counts = tally(progress.verdicts_of(name, ids))
    over = {one["id"] for one in progress.left_out if one["implementation"] == name and one["reason"].startswith(SPENT)}
    told = f"{counts.failed} failed, {counts.known} failed as expected, {counts.skipped} skipped, "
    return (
        f"profile {profile} on {selection.hardware_class}: {name} passed {counts.passed} of {len(ids)} items, {told}"
        f"{len(ids & over)} left out for time, in {progress.seconds_of(name, ids):.0f} s of cases"
    )


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
            chosen = quick.choose([_candidate(item, selection) for item in same])
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


def _candidate(item: pytest.Function, selection: Selection) -> quick.Candidate:
    path, function = _function(item)
    needs = _needs(item)
    values = _values(item)
    return quick.Candidate(
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
    tables = {folder: standard.read(folder) for folder in {item.path.parent for item in items}}
    chosen: list[int] = []
    begin = 0
    for (path, name), same in itertools.groupby(items, key=_function):
        combinations = [pairs.Combination(_values(item), cases.launch_of(item).size, _needs(item)) for item in same]
        listed = tables[path.parent].get(f"{path.name}::{name}", ())
        chosen += (begin + index for index in pairs.cover(combinations, always=listed))
        begin += len(combinations)
    return chosen


def _values(item: pytest.Function) -> dict[str, str]:
    return {name: standard.text(value) for name, value in item.callspec.params.items() if name != "rank"}


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
