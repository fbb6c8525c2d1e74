"""What a run shows beside pytest's own lines: the live line, waits, and failures and outputs that are alike once.

Failures are printed where all reports arrive, in the controller of an xdist run. Only what is printed changes: the run
file and ``--junitxml`` keep the text of every case, and with ``-v`` pytest prints all of them as well.
"""

import contextlib
import copy
import importlib.util
import os
import pathlib
import re
import sys
import textwrap
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pytest

from shardproof.alike import kind_of_text, without_rank
from shardproof.harness.plugin.records import MadeRecord
from shardproof.harness.verdicts.texts import gist, ranks_of
from shardproof.harness.worlds import waiting
from shardproof.harness.worlds.watchdog import without_harness

# The live line of a run on a terminal: cases done and failed, the current case of each world, and the time left.
#
# It takes the place of pytest's dots while tests run, and is gone when the summary is printed. There is no thread: the
# line changes when a case starts or ends. rich draws it; without rich there is no line, and pytest's dots stay.

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


# Lines that must be seen while a case runs, when pytest captures output.


def show(config: pytest.Config) -> None:
    """Show the lines of ``waiting`` on the terminal of this run, until the run ends.

    An xdist worker's reporter writes to nowhere. Its lines go to stderr, which it shares with the controller.
    """
    before = waiting.tell

    def tell(line: str) -> None:
        with _uncaptured(config), away(config):
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


#: The styles of ``--tb`` in which pytest prints the texts of failures.
_STYLES_WITH_TEXT = ("auto", "long", "short", "native")

#: The most characters of the one line; with CI set pytest does not shorten it.
_MOST_OF_A_MESSAGE = 300

#: Begins the last line of a failure: the command that repeats it.
_REPRODUCE = "\nreproduce: "

_ALL_FAILURES = pytest.StashKey[list[Any]]()


def fill_in(report: pytest.TestReport, made: MadeRecord) -> None:
    """Make the error itself the one line that pytest's summary and ``--junitxml`` show of a failure."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.failed and crash is not None:
        crash.message = f"{made.verdict}: {gist(made.text)}"[:_MOST_OF_A_MESSAGE]


def end_with_command(report: pytest.TestReport, command: str) -> None:
    """Let what pytest prints of a failure end with the command that repeats it.

    The text of the report may be another plugin's, as of a timeout.
    """
    if not report.failed or not command:
        return
    line, text = f"{_REPRODUCE}{command}", str(report.longrepr)
    if isinstance(report.longrepr, str):
        report.longrepr = text.removesuffix(line) + line
    elif (add := getattr(report.longrepr, "addsection", None)) is not None and not text.endswith(line):
        add("reproduce", command)
    if report.sections:  # pytest prints what ranks printed after the text
        report.sections.append(("reproduce", command))


def add_outputs(item: pytest.Item, outputs: Sequence[str]) -> None:
    """Attach what the ranks printed, by rank, to the report, once where ranks printed the same."""
    alike: dict[str, list[int]] = {}
    for index, output in enumerate(outputs):
        if output:
            alike.setdefault(without_rank(output), []).append(index)
    for first, *others in alike.values():
        equal = [index for index in others if outputs[index] == outputs[first]]
        similar = [index for index in others if index not in equal]
        who = ranks_of([first, *equal]) + (f"; {ranks_of(similar)} alike" if similar else "")
        item.add_report_section("call", f"output of {who}", without_harness(outputs[first]))


class AlikeFailures:
    """Prints failures of cases that are alike once, with the other cases under the first.

    pytest prints the failures in a wrapper of ``pytest_terminal_summary``. This wrapper is around it, and leaves it the
    first failure of each kind; :class:`AllFailures` returns the others before any other hook runs.
    """

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> Generator[None]:
        """Replace the failures of the run by the first of each kind until they are printed."""
        option = config.option
        if option.verbose <= 0 and option.tbstyle in _STYLES_WITH_TEXT and "failed" in terminalreporter.stats:
            config.stash[_ALL_FAILURES] = terminalreporter.stats["failed"]
            width = config.get_terminal_writer().fullwidth
            terminalreporter.stats["failed"] = first_of_each_kind(terminalreporter.stats["failed"], width=width)
        try:
            return (yield)
        finally:
            _restore(terminalreporter, config)


class AllFailures:
    """Returns all failures of the run to the terminal reporter, whose summary and counts follow."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """Undo what :class:`AlikeFailures` did."""
        _restore(terminalreporter, config)


def _restore(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _ALL_FAILURES in config.stash:
        terminalreporter.stats["failed"] = config.stash[_ALL_FAILURES]
        del config.stash[_ALL_FAILURES]


def first_of_each_kind(reports: Sequence[Any], *, width: int) -> list[Any]:
    """Leave one report of those that are alike, in order, and those that are not of cases.

    Failures are alike if they have the same implementation, verdict and text, but for the numbers and names of a
    comparison, and for the case's own frames if an error was raised below them. Reports that stand for others are
    copies with the ids of the others below their texts.
    """
    kinds: dict[Any, list[Any]] = {}
    for report in reports:
        kinds.setdefault(_kind_of(report), []).append(report)
    return [_standing_for(same, width) for same in kinds.values()]


def _kind_of(report: Any) -> Any:
    case = getattr(report, "shardproof", None)
    if case is None or case["failure"] is None:
        return id(report)
    file = pathlib.PurePath(report.nodeid.partition("::")[0]).name
    # Two cases that fail alike may first diverge in different places.
    text = case["failure"]["text"].removesuffix(case.get("explanation", {}).get("text", ""))
    return case["implementation"], case["verdict"], kind_of_text(text, file)


def same_failure(others: int) -> str:
    """Say that further cases fail alike."""
    cases = f"{others} more case{'s' if others > 1 else ''}"
    return f"{cases} with the same failure (only numbers and names differ; -v prints each):"


def _standing_for(reports: Sequence[Any], width: int) -> Any:
    first, *others = reports
    if not others:
        return first
    functions: dict[str, list[str]] = {}
    for report in others:
        function, bracket, parameters = report.nodeid.partition("[")
        functions.setdefault(function, []).append(bracket + parameters)
    lines = [same_failure(len(others))]
    for function, parameters in functions.items():
        listed = f"{function}{' ' if parameters[0] else ''}{' '.join(parameters)}"
        lines += textwrap.wrap(
            listed, width, initial_indent="  ", subsequent_indent="    ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    shown = copy.copy(first)
    text, line, command = str(first.longrepr).rpartition(_REPRODUCE)
    if not line or "\n" in command:
        text, line, command = str(first.longrepr), "", ""
    shown.longrepr = "\n".join([text, *lines]) + line + command
    return shown
