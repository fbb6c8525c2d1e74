"""Pytest's side of a sweep: notes which lines each item executes, or runs the items of each change.

The variable ``SHARDPROOF_SWEEP_TASK`` names a file with the task. A process claims a change before it runs its items,
so that several share a list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from shardproof.harness.worlds import forkserver

#: The environment variable that names the file with the task.
TASK = "SHARDPROOF_SWEEP_TASK"

#: The most characters of the message of a failure.
_MOST = 400


@dataclasses.dataclass
class Task:
    """What a pytest process of a sweep does.

    It runs changes, dictionaries each with the ids of its items in order, until a time of ``time.time``, and makes a
    file in the folder ``claims`` for each. Without changes it runs the selected items once and notes their lines.
    """

    sources: str
    folder: str
    changes: list[tuple[dict[str, Any], list[str]]] | None
    until: float
    claims: str


_task = Task(**json.loads(pathlib.Path(os.environ[TASK]).read_text()))
_folder = pathlib.Path(_task.folder)
_orders = _folder / f"orders.{os.getpid()}.json"
_failures: list[str] = []

# Read when the forkserver starts: each process has orders, and thereby ranks, of its own.
os.environ["SHARDPROOF_SWEEP"] = str(_orders)
forkserver.PRELOADED = "sweeping.ranks"


def _order(change: dict[str, Any] | None = None) -> None:
    order = {"sources": _task.sources, "change": change, "notes_lines": _task.changes is None}
    _orders.write_text(json.dumps(order))


_order()


def _write(kind: str, line: Any) -> None:
    with (_folder / f"{kind}.{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember what a failure says."""
    if report.failed:
        record = getattr(report, "shardproof", None) or {}
        failure = (record.get("failure") or {}).get("text") or str(report.longrepr)
        _failures.append(failure.strip()[:_MOST])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note the lines that the ranks of an item execute."""
    if _task.changes is not None:
        return (yield)
    lines = _orders.with_suffix(".lines")
    lines.unlink(missing_ok=True)
    began = time.monotonic()
    result = yield
    written = lines.read_text().splitlines() if lines.exists() else []
    executed = sorted({tuple(line) for rank in written for line in json.loads(rank)})
    _write("lines", [item.nodeid, time.monotonic() - began, executed, _failures[:1]])
    _failures.clear()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the items of each change that no other process has claimed."""
    if _task.changes is None:
        return None
    items = {item.nodeid: item for item in session.items}
    for change, names in _claimed(_task.changes):
        _run(change, [items[name] for name in names if name in items])
    return True


def _claimed(changes: list[tuple[dict[str, Any], list[str]]]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    for number, each in enumerate(changes):
        with contextlib.suppress(FileExistsError):
            pathlib.Path(_task.claims, str(number)).touch(exist_ok=False)
            yield each


def _run(change: dict[str, Any], items: list[pytest.Item]) -> None:
    """Run items until one fails, and write what came of it."""
    _failures.clear()
    _order(change)
    ran: list[str] = []
    killer = None
    for item in items:
        if time.time() > _task.until:
            break
        # Without a next item, because that would be the first one of another change if this one fails.
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        ran.append(item.nodeid)
        if _failures:
            killer = item.nodeid
            break
    _order()
    unfound = _orders.with_suffix(".unfound")
    status = "unfound" if unfound.exists() else "found" if killer else "lives"
    unfound.unlink(missing_ok=True)
    if ran:
        _write("results", [change["name"], status, ran, killer, _failures[:1]])
