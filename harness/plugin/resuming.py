"""What a restarted torchrun job keeps of the attempt before: the records of its cases, and which case was interrupted.

Torch elastic restarts all processes of a job. The new controller reads the journal that the last one left on its disk,
repeats the records that it finds there instead of running their cases again, and records the case that was running then
as interrupted. Beside the journal, ``FILE.running`` names the cases that are running.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import threading
import zlib
from typing import Any

from shardproof.harness.worlds.torchrun.roles.roles import Place

from shardproof.harness.plugin.journal import PARTIAL

Key = tuple[str, str]
"""The implementation and the id of a case."""


class Resuming:
    """The earlier attempts of one job, and what the next one has to know of this.

    Args:
        report: the run file of the run.
        place: the place of this process in the job.

    Attributes:
        records: the records of the earlier attempts, as JSON values.
        interrupted: the cases that were running when the last attempt ended.
        exit_code: that of the run if an earlier attempt has completed it; None otherwise.
    """

    def __init__(self, report: pathlib.Path, place: Place) -> None:
        self._place = place
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
        same_agent = job.get("agent") == self._place.agent
        return job.get("run_id") == self._place.run_id and (same_agent or job["attempt"] < self._place.attempt)

    def begin(self, key: Key) -> None:
        """Note that a case is about to run; threads may call this."""
        with self._lock, contextlib.suppress(OSError):
            self._begun.add(key)
            self._running.write_text(json.dumps(sorted(self._begun)))

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
    """Read a run file or a journal that ends after any line; None if there is none, or it is none."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if content.startswith(b"\x1f\x8b"):
        # The end of what a killed process wrote is missing.
        with contextlib.suppress(zlib.error):
            content = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS).decompress(content)
    lines = content.decode(errors="replace").rpartition("\n")[0]
    for end in ("", "]}", "}"):
        with contextlib.suppress(ValueError):
            run = json.loads(lines + end)
            return run if isinstance(run, dict) else None
    return None
