"""What the end of a run prints of its failures: those that are alike once, and what ranks printed alike once.

Failures are printed where all reports arrive, in the controller of an xdist run. Only what is printed changes: the run
file and ``--junitxml`` keep the text of every case, and with ``-v`` pytest prints all of them as well.
"""

from __future__ import annotations

import copy
import pathlib
import re
import textwrap
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from shardproof.harness.plugin.records import ALIKE, CaseRecord
from shardproof.harness.verdicts.texts import gist, ranks_of, without_rank
from shardproof.harness.worlds.watchdog import without_harness

_FRAME = '  File "'
_SIZE = re.compile(r"\bof \d+(?=[:,])")
_RANKS = re.compile(r"\branks? [\d*, -]*[\d*]")
_NUMBERS = re.compile(r"-?\b\d[\d.]*(e[+-]?\d+)?\b(, -?\d+)*")
_QUOTED = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")

#: The styles of ``--tb`` in which pytest prints the texts of failures.
_STYLES_WITH_TEXT = ("auto", "long", "short", "native")

#: The most characters of the one line; with CI set pytest does not shorten it.
_MOST_OF_A_MESSAGE = 300

#: Begins the last line of a failure: the command that repeats it.
_REPRODUCE = "\nreproduce: "

_ALL_FAILURES = pytest.StashKey[list[Any]]()


def fill_in(report: pytest.TestReport, made: CaseRecord) -> None:
    """Make the error itself the one line that pytest's summary and ``--junitxml`` show of a failure.

    Args:
        report: the report of the case's call; changed in place.
        made: the record of the case.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.failed and crash is not None:
        crash.message = f"{made.verdict}: {gist(made.text)}"[:_MOST_OF_A_MESSAGE]


def end_with_command(report: pytest.TestReport, command: str) -> None:
    """Let what pytest prints of a failure end with the command that repeats it.

    Args:
        report: the report of the case's call; changed in place. Its text may be another plugin's, as of a timeout.
        command: the command.
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
    """Attach what the ranks printed to the report, once where ranks printed the same.

    Args:
        item: the case.
        outputs: what each rank printed, by rank.
    """
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
    """Leave one report of those that are alike, in order.

    Failures are alike if they have the same implementation, verdict and text, but for the numbers and names of a
    comparison, and for the case's own frames if an error was raised below them.

    Args:
        reports: reports of failures; those that are not of cases are kept.
        width: the width of the terminal.

    Returns:
        The reports to print. Those that stand for others are copies with the ids of the others below their texts.
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


def kind_of_text(text: str, file: str) -> str:
    """Reduce the text of a failure to what the texts of failures that are alike share.

    Args:
        text: the text of a failed case.
        file: the name of the case's file.
    """
    text = _SIZE.sub("of #", without_rank(text.replace(ALIKE, "")))
    lines = text.splitlines()
    in_case = f'{file}", line '
    frames = [line for line in lines if line.startswith(_FRAME)]
    if "Traceback (most recent call last)" in text and frames and in_case in frames[-1]:
        return text
    kept, is_case = [], False
    for line in lines:
        is_case = in_case in line if line.startswith(_FRAME) else is_case and line.startswith("    ")
        if not is_case:
            kept.append(line if line.startswith(_FRAME) else _without_numbers_and_names(line))
    return "\n".join(kept)


def _without_numbers_and_names(line: str) -> str:
    return _NUMBERS.sub("#", _RANKS.sub("ranks #", _QUOTED.sub("'...'", line)))


def _standing_for(reports: Sequence[Any], width: int) -> Any:
    first, *others = reports
    if not others:
        return first
    functions: dict[str, list[str]] = {}
    for report in others:
        function, bracket, parameters = report.nodeid.partition("[")
        functions.setdefault(function, []).append(bracket + parameters)
    lines = [f"{len(others)} more fail alike, but for numbers and names (-v prints each):"]
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
