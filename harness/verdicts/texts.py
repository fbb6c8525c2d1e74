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
