"""From test functions to items on worlds."""

from __future__ import annotations

import pytest

from shardproof.harness.plugin import cases
from shardproof.harness.plugin.state import STATE


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make one item for each implementation and world of a marked function, first among the parameters."""
    worlds = metafunc.definition.get_closest_marker("world")
    if "rank" not in metafunc.fixturenames or worlds is None:
        return
    chosen = metafunc.config.stash[STATE].selection
    launches = [
        cases.Launch(name, size) for name in chosen.implementations for size in worlds.args if chosen.allows(size)
    ]
    metafunc.parametrize("rank", launches, ids=map(str, launches), indirect=True)


def check_and_filter(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse cases that cannot run on ranks, read known failures, and drop cases without a world, in place.

    Raises:
        pytest.UsageError: a case cannot run on ranks, or a file of known failures cannot be read.
    """
    functions = [item for item in items if isinstance(item, pytest.Function) and cases.is_case(item)]
    errors = [error for item in functions if (error := cases.usage_error(item))]
    state = config.stash[STATE]
    if functions:
        # Before anything is deselected, so that entries are matched with every case there is.
        errors += state.known_failures.read(items)
    if errors:
        state.refuse(config, items, errors)
    filtered = [item for item in items if _is_filtered_out(item)]
    if filtered:
        config.hook.pytest_deselected(items=filtered)
        items[:] = [item for item in items if item not in filtered]


def _is_filtered_out(item: pytest.Item) -> bool:
    """Whether ``--world`` left a case without any world: pytest then makes one item without a launch."""
    callspec = getattr(item, "callspec", None)
    marked = item.get_closest_marker("world") is not None
    return marked and callspec is not None and "rank" in callspec.params and not cases.is_case(item)
