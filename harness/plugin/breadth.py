"""In which order the cases of profiles run, whose time may be over before their end: breadth before depth.

First come cases that together check every requirement of the profiles, then one case of each test function, then the
rest, in which chapters take turns by time. A run that is short of time has thus looked at each requirement.
"""

import collections
from collections.abc import Collection, Iterable

import pytest

from shardproof.harness.plugin import cases, changed
from shardproof.harness.plugin.selection import Selection

COVERS, FIRST, FURTHER = range(3)
"""Why a case runs when it does: it checks a requirement that none before it checks, or is the first of its function."""


def ordered(
    items: Iterable[pytest.Function],
    selection: Selection,
    known: changed.Map,
    *,
    wanted: Collection[str],
    first: Collection[pytest.Function],
) -> dict[pytest.Function, int]:
    """Return the turn of each case, and the cases in their order within a turn.

    Args:
        items: the cases, of several implementations next to each other, because they share baselines.
        selection: decides which cases can run here.
        known: has what cases take.
        wanted: the requirements of the profiles.
        first: one case of each function.
    """
    given = list(items)
    by_implementation: dict[str, list[pytest.Function]] = collections.defaultdict(list)
    for item in given:
        by_implementation[cases.launch_of(item).implementation].append(item)
    covering = {item for same in by_implementation.values() for item in _cover(same, selection, known, set(wanted))}
    turns = {item: COVERS if item in covering else FIRST for item in given if item in covering or item in first}
    chapters: dict[str, dict[str, list[pytest.Function]]] = {}
    for item in given:
        if item not in turns:
            chapters.setdefault(item.path.name, {}).setdefault(cases.case_id(item), []).append(item)
    several = changed.in_turn(
        [list(same.values()) for same in chapters.values()], lambda same: sum(_seconds(one, known) for one in same)
    )
    return turns | {item: FURTHER for same in several for item in same}


def _cover(
    items: Iterable[pytest.Function], selection: Selection, known: changed.Map, wanted: set[str]
) -> list[pytest.Function]:
    """Choose cases that can run here and check each of the requirements, as many in a second as possible."""
    checked = {
        item: wanted.intersection(cases.requirements(item)) for item in items if not cases.missing(item, selection)
    }
    chosen = []
    while checked:
        best = max(checked, key=lambda item: len(checked[item]) / _seconds(item, known))
        if not (new := checked.pop(best)):
            break
        chosen.append(best)
        checked = {item: names - new for item, names in checked.items()}
    return chosen


def _seconds(item: pytest.Function, known: changed.Map) -> float:
    """What a case takes, with a second for what surrounds it."""
    return 1 + known.seconds_of(cases.launch_of(item).implementation, cases.case_id(item))
