"""The file of ``--json``: what a command that judges has found, in one form for all of them (docs/run-files.md).

``doctor``, ``compare``, ``state``, ``check`` and ``gate`` write it. Texts are those that the command prints.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shardproof import commands, folders, jsonfiles
from shardproof.jsonfiles import described, says, written

VERSION = 1

FOUND: Final = "found"
NOTHING: Final = "nothing found"
NOT_JUDGED: Final = "not judged"


@described()
class Item:
    """A finding, a note, a divergence, a difference or a regression."""

    kind: str = says(
        '"finding" and "note" of the doctor, "divergence", "difference"; of the gate the kind of regression'
    )
    title: str = says("the mistake or the difference, in one line")
    codes: Sequence[str] = written("checks and the signature, as `shardproof explain` takes them", default=())
    lines: Sequence[str] = written("further lines, as printed", default=())
    where: Mapping[str, Any] = written("the step, the rank, the name, the case, as far as it is known", default={})


@described()
class Judgement:
    """The result of a command that judges."""

    judgement_version: int = written("of this form", default=VERSION)
    command: str = says("its name")
    verdict: str = says('"found", "nothing found" (of what was looked at) or "not judged"')
    items: Sequence[Item] = says("findings, notes, divergences and others, in the order of the printed text")
    text: Sequence[str] = says("the summary, a string for each line")


def codes_in(lines: Sequence[str]) -> list[str]:
    """Return the codes at the ends of lines: of "... the size of dp [S1]" that of the signature."""
    return [
        code
        for line in lines
        for found in re.findall(r"\[([DS]\d+(?:, [DS]\d+)*)\]$", line)
        for code in found.split(", ")
    ]


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option to the parser of a command."""
    parser.add_argument("--json", metavar="FILE", help="write what was found as JSON, for programs and agents")


def of(command: str, items: Sequence[Item], text: str, *, is_judged: bool = True) -> Judgement:
    """Return a judgement; notes alone find nothing."""
    found = any(one.kind != "note" for one in items)
    verdict = FOUND if found else NOTHING if is_judged else NOT_JUDGED
    return Judgement(command=command, verdict=verdict, items=items, text=text.splitlines())


def write(path: str | None, judgement: Judgement) -> int:
    """Write the file, if the option names one; return 0, or the exit code of a file that cannot be written."""
    return 0 if path is None else write_json(judgement.command, path, judgement)


def write_json(command: str, path: str, found: Any) -> int:
    """Write what a command has found to the file of its ``--json``; return 0, or the exit code if it cannot."""
    try:
        text = json.dumps(jsonfiles.encode(found), indent=1, allow_nan=False)
        folders.write_file(Path(path), f"{text}\n")
    except folders.NotWritten as error:
        return commands.refuse(f"{command}: --json {error}")
    return 0
