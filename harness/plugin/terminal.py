"""What a run shows beside pytest's own lines: waits, and failures and outputs that are alike once.

Failures are printed where all reports arrive, in the controller of an xdist run. Only what is printed changes: the run
file and ``--junitxml`` keep the text of every case, and with ``-v`` pytest prints all of them as well.
"""

import contextlib
import copy
import pathlib
import textwrap
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from shardproof.alike import kind_of_text, without_rank
from shardproof.harness.judging.texts import gist, ranks_of
from shardproof.harness.plugin import live
from shardproof.harness.plugin.records import MadeRecord
from shardproof.harness.worlds import waiting
from shardproof.harness.worlds.watchdog import without_harness


def show(config: pytest.Config) -> None:
    """Show the lines of ``waiting`` on the terminal of this run, until the run ends.

    An xdist worker's reporter writes to nowhere. Its lines go to stderr, which it shares with the controller.
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
