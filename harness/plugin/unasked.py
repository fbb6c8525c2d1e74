"""What is required of every implementation and no case of a run asks, because ``--world`` leaves those cases out."""

import functools
from collections.abc import Iterable, Mapping, Sequence

import pytest

from shardproof import contract
from shardproof.harness.adapters.capability import EVERY
from shardproof.harness.judging.texts import rank_count
from shardproof.harness.plugin import cases
from shardproof.harness.plugin.selection import Selection

Unasked = Mapping[str, Mapping[str, str]]
"""By implementation, what each requirement that no case asks would need, such as "4 ranks"."""


def find(without_world: Sequence[pytest.Item], items: Iterable[pytest.Item], selection: Selection) -> Unasked:
    """Return the requirements marked *any* in the contract that no case of the run asks of an implementation.

    ``without_world`` are the collected items that ``--world`` left without a world, ``items`` those that are to run.
    """
    if not without_world:  # a run without `--world` need not ask what each of its items lacks
        return {}
    running = [item for item in items if cases.is_case(item) and cases.missing(item, selection) is None]
    found: dict[str, dict[str, str]] = {}
    for name in selection.implementations:
        mine = (item for item in running if cases.launch_of(item).implementation == name)
        asked = {one for item in mine for one in cases.requirements(item)}
        sizes: dict[str, int] = {}
        has = selection.capabilities[name]
        for item in without_world:
            needed = {one for mark in item.iter_markers("needs") for one in mark.args if one in EVERY}
            world = item.get_closest_marker("world")
            if needed <= has and world is not None and item.get_closest_marker("nightly") is None:
                for one in (_required() & set(cases.requirements(item))) - asked:
                    sizes[one] = min(*world.args, sizes.get(one, max(world.args)))
        if sizes:
            found[name] = {one: rank_count(sizes[one]) for one in sorted(sizes, key=_by_chapter)}
    return found


def lines(found: Unasked) -> list[str]:
    """Return a line for each implementation; none where everything is asked."""
    texts = ((name, ", ".join(f"{one} (needs {what})" for one, what in needs.items())) for name, needs in found.items())
    return [f"{name}: required of every implementation, not run: {text}" for name, text in texts]


@functools.cache
def _required() -> frozenset[str]:
    """The ids that the contract marks as required of every implementation that trains."""
    return frozenset(id_ for _, _, rows in contract.chapters() for id_, _, of_any in rows if of_any)


def _by_chapter(requirement: str) -> tuple[str, int]:
    chapter, _, number = requirement.rpartition("-")
    return chapter, int(number)
