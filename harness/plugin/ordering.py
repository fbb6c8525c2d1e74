"""Orders cases so that a failure shows early, worlds are started seldom and workers wait for each other seldom."""

from __future__ import annotations

from collections.abc import Container, Sequence

import pytest

from shardproof.harness.plugin import cases
from shardproof.harness.plugin.selection import Selection


def order(items: list[pytest.Item], selection: Selection, *, tiers: Sequence[Container[pytest.Item]]) -> None:
    """Put the cases of an implementation that has worlds of its own together, and those that want to be alone last.

    Of an implementation the cases come in tiers: one of each function before a second one of any. In the order of the
    files a bug that the last chapter alone finds showed after the whole run, and a run that is stopped had not
    looked at some chapters at all.

    A process keeps a few worlds. With more implementations than that, of which each needs its own, cases in the order
    of the suites start a world each: of 13 implementations on two GPUs a quarter was done in 450 s, most of it starts.
    A case that shares its devices with no other waits for all workers, which wait for it in turn; at the end none does.

    Within a tier the order is that of the suites. Implementations whose worlds are shared stay side by side, because
    they share baselines as well.

    Args:
        items: all collected items; changed in place. Those that are not cases stay where they are in a file.
        selection: the implementations and options of the run.
        tiers: the cases that come first, then those that come next; an item is of the first tier that has it, and one
            that none has comes after all of them.
    """
    apart = [name for name, kind in selection.implementations.items() if kind.traits.isolation != "shared"]

    def place(item: pytest.Item) -> tuple[bool, int, int]:
        if not cases.is_case(item):
            return False, 0, 0
        implementation = cases.launch_of(item).implementation
        block = 1 + apart.index(implementation) if implementation in apart else 0
        tier = next((number for number, tier in enumerate(tiers) if item in tier), len(tiers))
        return item.get_closest_marker("alone") is not None, block, tier

    items.sort(key=place)
