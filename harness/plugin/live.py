"""The live line of a run on a terminal: cases done and failed, the current case of each world, and the time left.

It takes the place of pytest's dots while tests run, and is gone when the summary is printed. There is no thread: the
line changes when a case starts or ends. rich draws it; without rich there is no line, and pytest's dots stay.
"""

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from shardproof.harness.judging.texts import gist

NAME = "shardproof-live"
"""The name under which pytest's plugin manager knows the line."""

_CASE = re.compile(r"(?P<function>[^:]+)\[(?P<implementation>.+?)-(?P<size>[ws]\d+)-?(?P<rest>.*)\]$")

#: The seconds over which the speed of a run is measured: cases of some chapters take much longer than those of others.
_SPEED_SECONDS = 600.0

#: The most characters of the reason of a failure.
_MOST_OF_A_REASON = 200


def register(config: pytest.Config) -> None:
    """Register the line if this run may have one: on a terminal, with pytest's usual verbosity, outside of CI."""
    reporter: Any = config.pluginmanager.getplugin("terminalreporter")
    is_worker = hasattr(config, "workerinput")
    if reporter is None or is_worker or not reporter.isatty() or config.option.verbose != 0:
        return
    # pytest's own notion of CI, and terminals that cannot move the cursor.
    if os.environ.get("CI") or os.environ.get("BUILD_NUMBER") or os.environ.get("TERM") == "dumb":
        return
    if config.option.capture == "no" or importlib.util.find_spec("rich") is None:
        return
    config.pluginmanager.register(LiveLine(reporter), NAME)


@contextlib.contextmanager
def away(config: pytest.Config) -> Iterator[None]:
    """Take the line away while something else is printed; nothing without a line."""
    line = config.pluginmanager.getplugin(NAME)
    if not isinstance(line, LiveLine) or not line.is_shown:
        yield
        return
    line.hide()
    try:
        yield
    finally:
        line.show()


class LiveLine:
    """Shows how far a run is; in an xdist run, in the controller."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter
        self._total = 0
        self._failed: set[str] = set()
        self._running: dict[str, None] = {}
        self._done: set[str] = set()
        self._progress: Any = None
        self._task: Any = None

    @property
    def is_shown(self) -> bool:
        """Whether the line is on the screen."""
        return self._progress is not None and bool(self._progress.live.is_started)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note how many tests there are; a controller's session has none."""
        self._total = self._total or len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Note how many tests there are; all workers have the same."""
        self._total = len(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Show the case that starts, and the line itself with the first case; a run of other tests has none."""
        self._running[nodeid] = None
        if self._progress is None and _CASE.search(nodeid):
            self._begin()
        self._refresh()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the failure of a case above the line."""
        if report.failed and self._progress is not None:
            self._failed.add(report.nodeid)
            record = getattr(report, "shardproof", None)
            reason = f"{record['verdict']}: {gist(record['failure']['text'])}" if record and record["failure"] else ""
            text = f"FAILED {report.nodeid} {reason[:_MOST_OF_A_REASON]}".rstrip()
            self._progress.console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Count a case that has ended."""
        self._running.pop(nodeid, None)
        self._done.add(nodeid)
        self._refresh()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_report_teststatus(self) -> Generator[None, Any, Any]:
        """Leave pytest no dot to print while the line is there."""
        status = yield
        return (status[0], "", "") if self.is_shown and status is not None else status

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Take the line away for good."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def hide(self) -> None:
        """Take the line away."""
        self._progress.stop()

    def show(self) -> None:
        """Show the line again."""
        self._progress.start()

    def _begin(self) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        # What the reporter would write beside the line: the files of tests.
        self._reporter.ensure_newline()
        self._reporter.showfspath = False
        self._progress = Progress(
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed"),
            TimeRemainingColumn(),
            TextColumn("left"),
            TextColumn("{task.fields[running]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            # pytest captures output only while a test runs: here it is the terminal's.
            console=Console(file=sys.stdout, force_terminal=True, width=self._reporter._tw.fullwidth),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            speed_estimate_period=_SPEED_SECONDS,
            expand=True,
        )
        self._task = self._progress.add_task("", total=self._total, failed=0, running="")
        self._progress.start()

    def _refresh(self) -> None:
        if self._progress is None:
            return
        running = ", ".join(sorted(map(label_of, self._running)))
        self._progress.update(
            self._task, completed=len(self._done), total=self._total, failed=len(self._failed), running=running
        )
        self._progress.refresh()


def label_of(nodeid: str) -> str:
    """Name a test in a few words: of a case the number of ranks, the implementation, and what tells it apart."""
    found = _CASE.search(nodeid)
    if found is None:
        return nodeid.rpartition("::")[2]
    rest = f"[{found['rest']}]" if found["rest"] else ""
    return f"{found['size']} {found['implementation']} {found['function']}{rest}"
