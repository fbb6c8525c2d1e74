"""A rank process, as the process that started it handles it: the controller, or the supervisor of another host."""

import contextlib
import dataclasses
import multiprocessing.process
import os
import pathlib
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from shardproof.harness.worlds import forkserver, waiting
from shardproof.harness.worlds.jobs import DUMPED, RankSpec
from shardproof.harness.worlds.torchrun.meeting import Channel
from shardproof.runfile import Verdict

#: Held by who starts a process or looks whether one has ended: of two threads that do so at once, one would take the
#: exit code that the other waits for.
_PROCESSES = threading.RLock()

#: Seconds after which the controller stops to wait for the end of a rank that it has killed. Only a rank that is in an
#: uninterruptible sleep, as in a broken driver, needs longer.
END_SECONDS = 10.0

#: Seconds after which the controller looks whether the forkserver, which reports the end of its ranks, is stopped.
_REPORT_SECONDS = 1.0

#: ``exitcode`` of a rank whose exit code the forkserver, which has ended, could not report.
_UNREPORTED = 255


@dataclasses.dataclass
class RankProcess:
    """The handle of one rank in the process that started it; ``output`` is the file with its stdout and stderr.

    In a supervisor there is no connection, because the rank is connected with the controller itself.
    """

    process: Any
    connection: Any
    output: pathlib.Path
    read: int = 0

    @property
    def dumped(self) -> pathlib.Path:
        """The file to which the rank appends a byte after each complete stack dump."""
        return self.output.with_suffix(DUMPED)

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        with _PROCESSES:
            return bool(self.process.is_alive())

    def new_output(self, limit: int = 64 * 1024) -> str:
        """Return the output that the rank has written since the last call, at most its last ``limit`` bytes."""
        size = self.output.stat().st_size if self.output.exists() else 0
        if size < self.read:  # the rank has truncated its file
            self.read = 0
        start, self.read = max(self.read, size - limit), size
        if size <= start:
            return ""
        with self.output.open("rb") as file:
            file.seek(start)
            return file.read(size - start).decode(errors="replace")

    def ending(self) -> tuple[Verdict, str]:
        """Return the verdict on a rank that has closed its connection, and how its process ended."""
        with _PROCESSES:
            self.process.join(timeout=1.0)
            code = self.process.exitcode
        if code == _UNREPORTED and forkserver.has_ended(within=1.0):
            text = "the forkserver ended, and its ranks with it; the next case gets a new one"
            return Verdict.HARNESS_ERROR, text
        if code is None:
            how = "it closed its connection and did not exit"
        elif code < 0:
            hint = ", which the kernel also sends when memory runs out" if -code == signal.SIGKILL else ""
            how = f"killed by {signal.Signals(-code).name}{hint}"
        else:
            how = f"exit code {code}"
        return Verdict.CRASH, f"the rank's process ended: {how}"


def spawn(spec: RankSpec, theirs: Connection | Channel) -> Any:
    """Start a rank process, as :func:`forkserver.spawn` does; closes ``theirs``, its end of the connection, here."""
    name = f"rank {spec.index}"
    process = forkserver.context().Process(target=forkserver.run_rank, args=(theirs, spec), daemon=True, name=name)
    try:
        with _PROCESSES:
            forkserver.spawn(process, f"{name} of {spec.key}")
    finally:
        theirs.close()
    return process


def kill(ranks: Sequence[RankProcess]) -> list[str]:
    """Kill ranks and the processes that they started, and wait until they have ended.

    A line is returned for each rank that did not end, which is given up, and for a forkserver that had to be killed.
    """
    for rank in ranks:
        if rank.is_alive:
            _kill_tree(rank.process.pid)
    lines = []
    if join(ranks, _REPORT_SECONDS) and forkserver.kill_if_stopped():
        lines.append("shardproof: the forkserver was stopped and has been killed; the next case gets a new one")
    for rank in join(ranks, END_SECONDS):
        lines.append(
            f"shardproof: {rank.process.name}, {waiting.look_at(rank.process.pid)}, did not end within "
            f"{END_SECONDS:g} s of SIGKILL; it may keep its device and its memory"
        )
        # Otherwise the interpreter would wait for it when it exits, for ever.
        multiprocessing.process._children.discard(rank.process)  # type: ignore[attr-defined]
    return lines


def join(ranks: Sequence[RankProcess], seconds: float) -> list[RankProcess]:
    """Wait for the end of all ranks; return those that have not ended."""
    until = time.monotonic() + seconds
    with _PROCESSES:
        for rank in ranks:
            rank.process.join(timeout=max(0.0, until - time.monotonic()))
        return [rank for rank in ranks if rank.process.is_alive()]


def _kill_tree(pid: int) -> None:
    """Kill a rank and the processes it started.

    A rank leads its own session, and so its own process group. A rank that is killed before it has created the session
    leads none: it is killed by its process id.
    """
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)
