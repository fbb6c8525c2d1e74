"""Starts and watches the processes that run the tests of files: a crash or a hang costs one test and no other."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

from tests.fsdp_impl.upstream.job import Job

# How often the events of a process are read.
_INTERVAL = 0.2
# Classes whose ranks serve all of their tests skip what follows a failure; a new process runs it.
_AFTER_A_FAILURE = "Previous test failed"
# Importing torch on a busy machine, before the first test.
_LONGEST_START = 300.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a test ended: ``pass``, ``fail``, ``skip``, ``hang``, ``crash`` or ``not run``, and what it said."""

    outcome: str
    text: str = ""
    seconds: float = 0.0


@dataclasses.dataclass
class Ran:
    """The outcomes of a file's tests; ``unusable`` is the error with which the file could not be imported."""

    outcomes: dict[str, Outcome]
    unusable: str = ""


def run(job: Job, limit: float, until: float) -> Ran:
    """Run the tests of a file, each in at most ``limit`` seconds, and stop at the time ``until`` (``time.monotonic``).

    A process that crashes in a test or exceeds the limit is replaced by one that goes on with the next test.
    """
    found: dict[str, Outcome] = {}
    stopped: list[tuple[str, Outcome]] = []
    names: list[str] = []
    while True:
        path = pathlib.Path(job.events)
        path.unlink(missing_ok=True)
        once = dataclasses.replace(job, leave_out=tuple(found))
        ended, begun, seen = _watch(once, limit, until)
        before = len(found)
        for event in seen:
            if "unusable" in event:
                return Ran({}, event["unusable"])
            if "found" in event:
                names = event["found"]
            if "ends" in event and not event["text"].startswith(_AFTER_A_FAILURE):
                found[event["ends"]] = Outcome(event["outcome"], event["text"], event["seconds"])
            if "stops" in event:
                stopped.append((event["stops"], Outcome(event["outcome"], event["text"])))
        if ended == "finished" and before < len(found) < len(names):
            continue
        if begun is None or ended == "out of time":
            if not names and ended == "crash":
                return Ran({}, "the process that imports it crashed")
            break
        found[begun] = Outcome(ended, _tail(path.with_suffix(".log")), limit if ended == "hang" else 0.0)
    for name in names:
        reason = next((one for where, one in stopped if name.split(".")[0] in where), None)
        found.setdefault(name, reason or Outcome("not run", f"not run: {ended}"))
    return Ran(found)


def _watch(job: Job, limit: float, until: float) -> tuple[str, str | None, list[dict[str, Any]]]:
    """Return how a process ended, the test in which it was, and the events that it wrote, with seconds."""
    path = pathlib.Path(job.events)
    command = [sys.executable, "-X", "faulthandler", "-m", f"{__package__}.process"]
    seen: list[dict[str, Any]] = []
    begun, since = None, time.monotonic()
    with open(path.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(
            command, env=job.environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        while True:
            code = process.poll()
            for event in _events(path)[len(seen) :]:
                now = time.monotonic()
                begun = event.get("begins")
                seen.append(event | {"seconds": now - since})
                since = now
            finished = bool(seen) and ("finished" in seen[-1] or "unusable" in seen[-1])
            late = time.monotonic() > until
            hangs = time.monotonic() - since > (limit if begun else max(limit, _LONGEST_START))
            if code is not None or finished or late or hangs:
                ended = "finished" if finished else "out of time" if late else "hang" if code is None else "crash"
                break
            time.sleep(_INTERVAL)
    with contextlib.suppress(ProcessLookupError):  # its ranks and their forkserver too
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if ended == "crash":
        with open(path.with_suffix(".log"), "a") as log:
            print(f"crash: the process ended with {process.returncode}", file=log)
    return ended, begun, seen


def _events(path: pathlib.Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def _tail(path: pathlib.Path) -> str:
    return path.read_text(errors="replace")[-4000:]
