"""What the texts of several reports share: tables, foreign text made safe to print, the code of a run, colours."""

import os
import re
from collections.abc import Iterable, Sequence
from typing import TextIO

from shardproof.alike import kind_of_text
from shardproof.door import printable
from shardproof.runfile import UNKNOWN, CaseRecord, Environment, Verdict

_HASH = re.compile(r"\b[0-9a-f]{40}\b")


def _verdicts(which: Iterable[Verdict]) -> str:
    """A pattern of verdicts where a report names them: in front of a line, with their number, or as a cell."""
    return rf"(?:^|(?<=  )|(?<=\s)\d+ )(?:{'|'.join(which)})(?=[:,]|  |$)"


#: What is coloured, by its colour: red, yellow or green. Lines with four spaces are the texts of failures and commands.
_COLOURED = re.compile(
    "|".join((
        "^    .*",
        rf"(?P<_31>{_verdicts(one for one in Verdict if one.fails)}|^WORSE|^[1-9]\d* of .* failed|\bINCOMPLETE\b"
        r"|^(?!accepted|better|expected failures|not compared)[a-z ]+ \(\d+\)(, [a-z ]+ \(\d+\))*:$)",
        rf"(?P<_33>{_verdicts(one for one in Verdict if one.is_skip or one is Verdict.EXPECTED_FAIL)}"
        r"|^accepted \(\d+\):$)",
        rf"(?P<_32>{_verdicts([Verdict.PASS])}|^nothing got worse|^0 of .* failed|^better \(\d+\):$)",
    )),
    re.MULTILINE,
)  # fmt: skip


def coloured(text: str, stream: TextIO) -> str:
    """Colour the verdicts of a report for a terminal. NO_COLOR and FORCE_COLOR count as in pytest."""
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    if os.environ.get("NO_COLOR") or not (is_terminal or os.environ.get("FORCE_COLOR")):
        return text
    return _COLOURED.sub(lambda one: f"\x1b[{one.lastgroup[1:]}m{one[0]}\x1b[0m" if one.lastgroup else one[0], text)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align rows of equal length into lines without trailing spaces, with two spaces between columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def kind_of(case: CaseRecord) -> tuple[str, str]:
    """Return what failures that are alike share: their verdict, and their text but for numbers and names."""
    text = case.failure.text if case.failure is not None else case.why
    if case.explanation is not None:
        # Two cases that fail alike may first diverge in different places.
        text = text.removesuffix(case.explanation.text)
    return case.verdict, kind_of_text(text, case.nodeid.partition("::")[0].rpartition("/")[2])


def cause(case: CaseRecord) -> str:
    """Return what a failure is counted by: its finding, as in ``F-29``, or the text of the expectation, or the case."""
    expected = case.verdict is Verdict.EXPECTED_FAIL
    # Older runs have the number in prose, F-2, and newer ones the name of the file, F002.py.
    number = re.search(r"\bF-?(\d{1,9})\b", case.expected) if expected else None
    return f"F-{int(number[1])}" if number else case.expected if expected else case.id


def counted(count: int, word: str) -> str:
    """Return a number and what it counts: ``1 case``, ``2 cases``."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def indented(text: str, spaces: int) -> list[str]:
    """Indent a text of several lines, each of which is made safe to print and has no trailing spaces."""
    return [(" " * spaces + printable(line.expandtabs())).rstrip() for line in text.splitlines()]


def shardproof(env: Environment) -> str:
    """Return the version of shardproof with its commit, as in ``0.1.0 (cc0c39b-dirty)``."""
    return _with(env.shardproof, env.shardproof_commit)


def torch(env: Environment) -> str:
    """Return the version of torch with its commit, as in ``2.13.0+cpu (cf30153)``."""
    return _with(env.torch, env.torch_git_version)


def short(commit: str) -> str:
    """Return a commit, or several, with seven digits each, as git shows them."""
    return _HASH.sub(lambda found: found[0][:7], commit)


def _with(version: str, commit: str) -> str:
    return version if commit in ("", UNKNOWN) else f"{version} ({short(commit)})"
