"""Lines that must be seen while a case runs, when pytest captures output."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from shardproof.harness.plugin import live
from shardproof.harness.worlds import waiting


def show(config: pytest.Config) -> None:
    """Show the lines of ``waiting`` on the terminal of this run, until the run ends.

    An xdist worker's reporter writes to nowhere. Its lines go to stderr, which it shares with the controller.

    Args:
        config: pytest's configuration.
    """
    before = waiting.tell

    def tell(line: str) -> None:
        with _uncaptured(config), live.away(config):
            reporter: Any = config.pluginmanager.getplugin("terminalreporter")
            if reporter is None or hasattr(config, "workerinput"):
                waiting.tell_on_stderr(line)
            else:
                reporter.ensure_newline()
                if reporter._tw.width_of_current_line:  # with -q, the line above starts none
                    reporter.write_line("")
                reporter.write_line(line, flush=True)

    def restore() -> None:
        waiting.tell = before

    waiting.tell = tell
    config.add_cleanup(restore)


def _uncaptured(config: pytest.Config) -> contextlib.AbstractContextManager[None]:
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    return contextlib.nullcontext() if manager is None else manager.global_and_fixture_disabled()
