"""What a restarted torchrun job keeps of the attempt before: the records of its cases, and which case was interrupted.

Torch elastic restarts all processes of a job. The new controller reads the journal that the last one left on its
disk, repeats the records that it finds there instead of running their cases again, and records the case that was
running then as interrupted. Beside the journal, ``FILE.running`` names the cases that are running.
"""

import contextlib
import json
import os
import pathlib
import threading
from typing import Any

from shardproof import folders
from shardproof.door import PARTIAL, content
from shardproof.harness.worlds.torchrun.meeting import JobProcess

Key = tuple[str, str]
"""The implementation and the id of a case."""


class Resuming:
    """The earlier attempts of one job, and what the next one has to know of this.

    Attributes:
        records: the records of the earlier attempts, as JSON values.
        interrupted: the cases that were running when the last attempt ended.
        exit_code: that of the run if an earlier attempt has completed it; None otherwise.
    """

    def __init__(self, report: pathlib.Path, process: JobProcess) -> None:
        self._process = process
        target = report.resolve()
        self._partial = target.with_name(target.name + PARTIAL)
        self._earlier = target.with_name(target.name + ".earlier")
        self._running = target.with_name(target.name + ".running")
        self._begun: set[Key] = set()
        self._lock = threading.Lock()
        self.records: dict[Key, dict[str, Any]] = {}
        self.interrupted: set[Key] = set()
        self.exit_code: int | None = None
        for path in (target, self._earlier, self._partial):
            self._read(path)
        if self._partial.exists() and self.records:
            # The new journal takes its place, and has the old records only after pytest has collected.
            os.replace(self._partial, self._earlier)

    def _read(self, path: pathlib.Path) -> None:
        run = read(path)
        if run is None or not self._is_ours(run.get("environment", {}).get("torchrun", {})):
            return
        if run.get("end", {}).get("complete"):
            self.exit_code = int(run["end"]["exit_code"])
            return
        self.records |= {(record["implementation"], record["id"]): record for record in run.get("cases", [])}
        if path == self._partial:
            with contextlib.suppress(OSError, ValueError):
                running = {(name, case) for name, case in json.loads(self._running.read_text())}
                self.interrupted = running - self.records.keys()

    def _is_ours(self, job: dict[str, Any]) -> bool:
        """Whether a run file is of an earlier attempt of this job.

        Torch elastic does not count all restarts, and its ids may be alike; the process of torchrun is one.
        """
        same_agent = job.get("agent") == self._process.agent
        return job.get("run_id") == self._process.run_id and (same_agent or job["attempt"] < self._process.attempt)

    def begin(self, key: Key) -> None:
        """Note that a case is about to run; threads may call this."""
        with self._lock, contextlib.suppress(folders.NotWritten):
            self._begun.add(key)
            folders.write(self._running.parent, {self._running.name: json.dumps(sorted(self._begun))})

    def end(self, key: Key) -> None:
        """Delete the note that a case is running, which its record replaces."""
        with self._lock:
            self._begun.discard(key)

    def forget(self) -> None:
        """Remove the records of earlier attempts, which this attempt's journal has now."""
        self._earlier.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove what only a restart needs; the run is complete."""
        self.forget()
        self._running.unlink(missing_ok=True)


def read(path: pathlib.Path) -> dict[str, Any] | None:
    """Read a run file or a journal that ends after any byte; None if there is none, or it is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        run = content(path, is_journal=True)
        return run if isinstance(run, dict) else None
    return None
