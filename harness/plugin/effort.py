"""Which of the selected cases a shorter run leaves out: ``--effort quick``, ``pairs``, ``standard`` or ``full``.

- ``full`` leaves out nothing.
- ``standard`` keeps of each case every pair of values of its parameters, every number of ranks, and the combinations
  that a table beside the case lists (``pairwise``, ``always``). What it keeps is the same for every host and
  implementation.
- ``pairs`` is ``standard`` in the smallest worlds that have a pair of values: two ranks, for a case of two and of four.
- ``quick`` keeps one item of each function for each implementation, so that every requirement has one, and of each
  value of the parameters that ``each_value`` names (``quick``).

The effort is applied last, to what ``--world``, ``-k``, ``-m`` and other plugins have selected, so that what they
exclude covers nothing. An item that the command line names by its node id is always kept.

Whatever the effort, the items that ``quick`` keeps run first, and then those of ``pairs`` (:mod:`.ordering`).
"""

from __future__ import annotations

import collections
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from shardproof.harness.plugin import always, cases, ordering, pairwise, quick
from shardproof.harness.plugin.pairwise import Combination
from shardproof.harness.plugin.progress import Progress
from shardproof.harness.plugin.selection import Effort, Selection
from shardproof.harness.plugin.state import State

_NOT_MEANT = "more ranks, to mean something of its own"
_SKIPPED = "no mark that skips it"


class Shortening:
    """A plugin that deselects what the effort of the run leaves out, and puts the rest in the order in which it runs.

    It does so after all plugins that select.

    Args:
        state: the state of this process.
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
            tiers = [set(choose(kept, self._state.selection, effort)) for effort in (Effort.QUICK, Effort.PAIRS)]
        except ValueError as error:
            self._state.refuse(config, items, [str(error)])
            return
        if spared := set(functions) - kept:
            self._state.spared = [item for item in functions if item in spared]
            config.hook.pytest_deselected(items=self._state.spared)
            items[:] = [item for item in items if item not in spared]
        ordering.order(items, self._state.selection, tiers=tiers)

    def _kept(self, functions: list[pytest.Function], config: pytest.Config) -> set[pytest.Function]:
        selection = self._state.selection
        if selection.effort == Effort.FULL:
            return set(functions)
        kept = set(_named(functions, config))
        return kept.union(choose([item for item in functions if item not in kept], selection, selection.effort))


def summary(effort: Effort, progress: Progress) -> str:
    """Return in one line which effort was run and what it left out.

    Args:
        effort: the effort.
        progress: the cases that were selected and left out.
    """
    counts: collections.Counter[str] = collections.Counter()
    for files in progress.spared.values():
        counts.update({pathlib.PurePath(file).stem.removeprefix("test_"): count for file, count in files.items()})
    if not counts:
        return f"effort {effort}: all cases"
    files_of = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"effort {effort}: {counts.total()} of {counts.total() + progress.count} cases left out: {files_of}"


def choose(items: Iterable[pytest.Function], selection: Selection, effort: Effort) -> Iterator[pytest.Function]:
    """Return the cases that an effort keeps.

    Args:
        items: cases, in any order.
        selection: the checked options of the run.
        effort: any effort but ``full``.

    Raises:
        ValueError: a table of combinations is not valid. The message is one line.
    """
    by_implementation: dict[str, list[pytest.Function]] = collections.defaultdict(list)
    for item in sorted(items, key=_order):
        by_implementation[cases.launch_of(item).implementation].append(item)
    for same in by_implementation.values():
        if effort == Effort.QUICK:
            chosen = iter(_one_a_function(same, selection))
        else:
            chosen = _every_pair(same, sizes=effort == Effort.STANDARD)
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


def _one_a_function(items: Sequence[pytest.Function], selection: Selection) -> list[int]:
    return quick.choose([_candidate(item, selection) for item in items])


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


def _every_pair(items: Sequence[pytest.Function], *, sizes: bool) -> Iterator[int]:
    tables = {folder: always.read(folder) for folder in {item.path.parent for item in items}}
    begin = 0
    for (path, name), same in itertools.groupby(items, key=_function):
        combinations = [_combination(item) for item in same]
        listed = tables[path.parent].get(f"{path.name}::{name}", ())
        yield from (begin + index for index in pairwise.cover(combinations, always=listed, sizes=sizes))
        begin += len(combinations)


def _combination(item: pytest.Function) -> Combination:
    return Combination(_values(item), cases.launch_of(item).size, _needs(item))


def _values(item: pytest.Function) -> dict[str, str]:
    return {name: always.text(value) for name, value in item.callspec.params.items() if name != "rank"}


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
