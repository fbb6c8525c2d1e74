"""Calls of user code, noted in a file of each rank, so that a function that raises or does not return is named."""

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardproof import door, folders
from shardproof.door import printable
from shardproof.harness.adapters.registry import line_of_error
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.request import Request

CALLED, RETURNED, RAISED = "called", "returned", "raised"


def file_of(folder: Path, request: Request, rank: int) -> Path:
    """Return the file of a rank's calls."""
    return folder / f"{'again' if request.readers else 'run'}-rank{rank}.calls"


class Calls:
    """Notes in a file which function is called, which has returned and which has raised."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Note a call of a function."""
        self._note(name, CALLED)
        try:
            yield
        except BaseException as error:
            self._note(name, RAISED, f"{line_of_error(error)}{_place_of(error)}")
            raise
        self._note(name, RETURNED)

    def _note(self, name: str, how: str, text: str = "") -> None:
        folders.append(self._path, json.dumps([time.time(), name, how, text]) + "\n")


def _place_of(error: BaseException) -> str:
    """Return the line of user code in which an error arose: the innermost that is in no package."""
    own = os.path.realpath(os.path.dirname(__file__))
    library = os.path.dirname(contextlib.__file__)
    frames = [
        one
        for one in traceback.extract_tb(error.__traceback__)
        if not one.filename.startswith("<")
        and "-packages" not in one.filename
        and not os.path.realpath(one.filename).startswith((own, library))
    ]
    return f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""


def line_of(folder: Path, request: Request) -> str:
    """Return which function of the user's raised first, or did not return, and on which ranks; empty for none."""
    last: dict[int, tuple[float, str, str, str]] = {}
    for rank in range(request.size):
        path = file_of(folder, request, rank)
        for line in door.lines(path, _call, may_be_cut=True) if path.exists() else ():
            last[rank] = line
    raised = sorted((when, rank, name, text) for rank, (when, name, how, text) in last.items() if how == RAISED)
    if raised:
        _, rank, name, text = raised[0]
        alike = sorted(other for _, other, *same in raised if same == [name, text])
        where = (
            f"all {request.size} ranks" if len(alike) == request.size > 1 else f"{ranks_of(alike)} of {request.size}"
        )
        return printable(f"{name} raised on {where}: {text}")
    waiting: dict[str, list[int]] = {}
    for rank, (_, name, how, _) in last.items():
        if how == CALLED:
            waiting.setdefault(name, []).append(rank)
    texts = [f"{name} has not returned on {ranks_of(ranks)} of {request.size}" for name, ranks in waiting.items()]
    return printable("; ".join(texts))


def _call(found: Any) -> tuple[float, str, str, str]:
    when, name, how, text = found
    return when, name, how, text
