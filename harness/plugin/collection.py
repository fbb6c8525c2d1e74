"""Makes one pytest item of a case for each implementation and world, and refuses items that cannot run on ranks."""

from __future__ import annotations

import pytest

from shardproof.harness.plugin import cases, drawing
from shardproof.harness.plugin.state import STATE

#: The size in the ids of simulated cases in a run without ``--simulate``.
_DEFAULT_SIZE = 1024


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Parametrize a function marked with ``@world`` by implementation and world size, before its other parameters.

    One marked with ``@simulated`` is parametrized by the sizes of simulated worlds.
    """
    worlds = metafunc.definition.get_closest_marker("world")
    simulated = metafunc.definition.get_closest_marker("simulated")
    if "rank" not in metafunc.fixturenames or (worlds is None and simulated is None):
        return
    chosen = metafunc.config.stash[STATE].selection
    if simulated is not None:
        # Without --simulate there is an item too, so that known failures find their cases; it is deselected.
        sizes = chosen.simulates or (_DEFAULT_SIZE,)
        launches = [cases.Launch(name, 1, size) for name in chosen.implementations for size in sizes]
    else:
        assert worlds is not None
        launches = [
            cases.Launch(name, size) for name in chosen.implementations for size in worlds.args if chosen.allows(size)
        ]
    metafunc.parametrize("rank", launches, ids=map(str, launches), indirect=True)
    parameter = drawing.drawn_parameter(metafunc.definition)
    if parameter is not None:
        name, kind = parameter
        metafunc.parametrize(name, [drawing.Drawn(kind)], ids=[pytest.HIDDEN_PARAM])


def check_and_filter(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse cases that cannot run on ranks, read the known failures, and deselect cases without a world.

    Args:
        config: pytest's configuration.
        items: all collected items; changed in place.

    Raises:
        pytest.UsageError: a case cannot run on ranks, or a file of known failures cannot be read. An xdist worker does
            not raise; it sends the errors to the controller.
    """
    functions = [item for item in items if cases.is_case(item)]
    errors = [error for item in functions if (error := cases.usage_error(item))]
    state = config.stash[STATE]
    if functions:
        # Before anything is deselected, so that entries are matched against all collected cases.
        errors += state.known_failures.read(items)
    if errors:
        state.refuse(config, items, errors)
    simulates = bool(functions) and bool(state.selection.simulates)
    filtered = [item for item in items if _is_filtered_out(item) or _is_of_other_worlds(item, simulates=simulates)]
    state.without_world = [item for item in filtered if _is_filtered_out(item)]
    if filtered:
        config.hook.pytest_deselected(items=filtered)
        items[:] = [item for item in items if item not in filtered]


def _is_filtered_out(item: pytest.Item) -> bool:
    """Return whether ``--world`` left a case with no world; pytest then makes one item whose ``rank`` is no Launch."""
    callspec = getattr(item, "callspec", None)
    marked = item.get_closest_marker("world") is not None
    return marked and callspec is not None and "rank" in callspec.params and not cases.is_case(item)


def _is_of_other_worlds(item: pytest.Item, *, simulates: bool) -> bool:
    """Return whether an item is a case of simulated worlds in a run of real ones, or the other way round."""
    return cases.is_case(item) and bool(cases.launch_of(item).simulates) != simulates
