"""What the forkserver imports in a sweep: its ranks change code around each job, or note the lines that it executes."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import shardproof.harness.worlds.preloaded  # noqa: F401
from shardproof.harness.worlds import loop
from sweeping import live
from sweeping.changes import Change

#: The environment variable that names the file with the orders of a pytest process.
ORDERS = "SHARDPROOF_SWEEP"

_run_job = loop.run_job


def run_job(*arguments: Any) -> Any:
    """Run a job as the orders of the moment say."""
    orders = pathlib.Path(os.environ[ORDERS])
    order = json.loads(orders.read_text())
    folder = pathlib.Path(order["sources"])
    if order["change"] is not None:
        around = _changed(Change(**order["change"]), folder, orders.with_suffix(".unfound"))
    elif order["notes_lines"]:
        around = _noted(folder, orders.with_suffix(".lines"))
    else:
        around = contextlib.nullcontext()
    with around:
        return _run_job(*arguments)


@contextlib.contextmanager
def _changed(change: Change, folder: pathlib.Path, unfound: pathlib.Path) -> Iterator[None]:
    undo = live.apply(change, folder)
    if not undo:
        unfound.touch()
    try:
        yield
    finally:
        live.take_back(undo)


@contextlib.contextmanager
def _noted(folder: pathlib.Path, path: pathlib.Path) -> Iterator[None]:
    """Append the lines of the folder's files that the block executes, in any Python thread, as one line of JSON."""
    prefix, lines = f"{folder}/", set()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        return trace_lines if frame.f_code.co_filename.startswith(prefix) else None

    def trace_lines(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename.removeprefix(prefix), frame.f_lineno))
        return trace_lines

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        # One write: other ranks append to the same file.
        with path.open("ab", buffering=0) as file:
            file.write(json.dumps(sorted(lines)).encode() + b"\n")


loop.run_job = run_job
