"""Texts of failures: bounded, in one line, with short lists of ranks."""

import re
from collections.abc import Iterable

#: The most characters of a failure's text. A text beyond it loses its middle: a comparison is at the beginning, the
#: error of a traceback at the end.
MOST_CHARACTERS = 16 * 1024

#: The most characters that one rank adds to it, so that the text of a case is not cut a second time.
MOST_OF_A_RANK = MOST_CHARACTERS // 2


def bounded(text: str, most: int = MOST_CHARACTERS) -> str:
    """Cut the middle out of a text that is too long, with a line that says how much, and make the text encodable.

    A lone surrogate in it is escaped, because no stream to the controller or a file can hold it.
    """
    if len(text) > most:
        head, tail = text[: most // 2], text[len(text) - most // 2 :]
        text = f"{head}\n... {len(text) - len(head) - len(tail)} characters left out ...\n{tail}"
    return text.encode(errors="backslashreplace").decode()


#: The most characters of a value in an exception's message, such as a list, a dict or a tensor, and of a line of it.
_MOST_OF_A_VALUE, _END_OF_A_VALUE, _MOST_OF_A_LINE = 240, 60, 1000

#: The most characters of a traceback in which values are looked for.
_MOST_READ = 64 * MOST_CHARACTERS

_TRACEBACK = "Traceback (most recent call last):"
_CLOSED_BY, _BRACKET = {"(": ")", "[": "]", "{": "}"}, re.compile(r"[()\[\]{}]")
#: What follows the message of an exception in a traceback of several.
_NEXT = (_TRACEBACK, "The above exception was the direct cause", "During handling of the above exception")


def readable(text: str) -> str:
    """Cut long values out of the messages of a traceback, so that each sentence is read at a glance.

    A value is what brackets enclose. One that has several lines gets one, and of a long one the beginning and the end
    stay: what is said of it follows it.

    Args:
        text: a traceback as Python formats it. Another text has no message, and stays; so does one of a mebibyte,
            out of which :func:`bounded` cuts more than any value.
    """
    parts: list[str] = []
    message: list[str] = []
    is_message = is_traceback = False
    if len(text) > _MOST_READ:
        return text
    for line in text.splitlines(keepends=True):
        if line.startswith(_NEXT):
            is_message, is_traceback = False, line.startswith(_TRACEBACK)
        elif is_traceback and line.strip() and not line.startswith("  "):
            is_message = True
        if is_message:
            message.append(line)
            continue
        if message:
            parts.append(_with_short_values("".join(message)))
            message = []
        parts.append(line)
    return "".join([*parts, _with_short_values("".join(message))])


def _with_short_values(text: str) -> str:
    parts, done = [], 0
    for first, last in _values(text):
        parts += [text[done:first], _without_middle(_in_one_line(text[first:last]), _MOST_OF_A_VALUE)]
        done = last
    lines = "".join([*parts, text[done:]]).splitlines(keepends=True)
    return "".join(_without_middle(line, _MOST_OF_A_LINE) for line in lines)


def _values(text: str) -> list[tuple[int, int]]:
    """Where brackets open and close outside of other brackets that close, in order."""
    found: list[tuple[int, int]] = []
    opened: list[int] = []
    for bracket in _BRACKET.finditer(text):
        if bracket[0] in _CLOSED_BY:
            opened.append(bracket.start())
        elif opened and bracket[0] == _CLOSED_BY[text[opened[-1]]]:
            first = opened.pop()
            while found and found[-1][0] > first:
                found.pop()
            found.append((first, bracket.end()))
    return found


def _in_one_line(value: str) -> str:
    return " ".join(line.strip() for line in value.splitlines()) if "\n" in value else value


def _without_middle(text: str, most: int) -> str:
    """Leave the beginning and the end of a text that is longer, without a short part of a word."""
    if len(text) <= most:
        return text
    head, tail = text[: most - _END_OF_A_VALUE], text[len(text) - _END_OF_A_VALUE :]
    return f"{re.sub(r' [^ ]{,20}$', '', head)} ... {re.sub(r'^[^ ]{,20} ', '', tail)}"


def frames_of(text: str) -> list[str]:
    """Return the lines of a traceback that name its frames; none of another text."""
    if not text.startswith("Traceback"):
        return []
    return [line for line in text.splitlines() if line.startswith('  File "')]


def ranks_of(ranks: Iterable[int]) -> str:
    """Name ranks in one short phrase: "rank 3", "ranks 0-4, 6-7"."""
    numbers = sorted(set(ranks))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    listed = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(numbers) != 1)} {listed}"


def rank_count(count: int) -> str:
    """Count ranks in words: "1 rank", "2 ranks"."""
    return f"{count} rank{'s' * (count != 1)}"


def gist(text: str) -> str:
    """Return the one line of a failure's text that is worth most: a traceback's error, else the beginning.

    In the record of a case, tracebacks of ranks each follow a line such as "rank 0 of 2:".
    """
    lines = text.splitlines() or [""]
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts or starts[0] > 1:
        return " ".join(lines[: 2 if _OF_RANKS.match(lines[0]) else 1])
    end = next((number for number in range(starts[0], len(lines)) if _OF_RANKS.match(lines[number])), len(lines))
    frames = [number for number in range(starts[0], end) if lines[number].startswith('  File "')]
    return next((line for line in lines[max(frames, default=end) + 1 : end] if not line.startswith("  ")), lines[0])


_OF_RANKS = re.compile(r"(every rank|ranks? [\d, -]+) of \d+")
