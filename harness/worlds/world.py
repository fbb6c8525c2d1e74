"""The controller's side of a world and of its rank processes."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing.process
import os
import pathlib
import shutil
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from shardproof.harness.collectives.board import Announcement, Board
from shardproof.harness.findings.texts import bounded
from shardproof.harness.findings.verdict import Verdict
from shardproof.harness.worlds import entry, forkserver, scratch, waiting
from shardproof.harness.worlds.jobs import BOARD, DUMPED, Job, RankSpec, Result, WorldKey
from shardproof.harness.worlds.waiting import Blockers, Wait, WaitedTooLong
from shardproof.harness.worlds.watchdog import Diagnosis, collectives, diagnose, dump_stacks, stacks

#: Seconds that the ranks may take from the fork to the first barrier, including device contexts and process groups.
START_SECONDS = 120.0

#: Seconds that the other ranks may take to finish after one rank failed; after that they count as waiting for it.
GRACE_SECONDS = 2.0

#: Seconds that the ranks may take to leave their loops when they are asked to, all together.
_LEAVE_SECONDS = 2.0

#: Seconds after which the controller stops to wait for the end of a rank that it has killed. Only a rank that is in an
#: uninterruptible sleep, as in a broken driver, needs longer.
END_SECONDS = 10.0

#: Seconds after which the controller looks whether the forkserver, which reports the end of its ranks, is stopped.
_REPORT_SECONDS = 1.0

#: Seconds between two looks at whether a starting world waits too long; an answer is received at once.
_POLL_SECONDS = 0.1

#: ``exitcode`` of a rank whose exit code the forkserver, which has ended, could not report.
_UNREPORTED = 255


@dataclasses.dataclass
class RankProcess:
    """The controller's handle of one rank.

    Attributes:
        process: the multiprocessing process.
        connection: the controller's end of the pipe.
        output: the file with the rank's stdout and stderr.
        read: the bytes of ``output`` that have been read.
    """

    process: Any
    connection: Connection
    output: pathlib.Path
    read: int = 0

    @property
    def dumped(self) -> pathlib.Path:
        """The file to which the rank appends a byte after each complete stack dump."""
        return self.output.with_suffix(DUMPED)

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


@dataclasses.dataclass
class Outcome:
    """The outcome of a job on a world.

    Attributes:
        results: one result for each rank, in rank order.
        outputs: the end of what each rank wrote to stdout and stderr.
        seconds: wall-clock time of the job, without the wait for a lease and the start of the world.
        diagnosis: the explanation of the hang, if a rank did not answer.
        collectives: the last collectives of the ranks, rendered, if they did not all pass or fail by agreement.
    """

    results: list[Result]
    outputs: list[str]
    seconds: float
    diagnosis: Diagnosis | None = None
    collectives: list[str] = dataclasses.field(default_factory=list)


class WorldDied(Exception):
    """A world could not be started; the message contains the answer and the output of the rank that failed."""


class World:
    """The ranks of one world; the constructor starts them and waits until they are ready.

    Args:
        key: identifies the world.
        devices: the device index of each rank.

    Raises:
        WorldDied: a rank did not start.
        OSError: there is no space for the world's directory.
        WaitedTooLong: the forkserver did not start a rank in time.

    Attributes:
        reserved_for: the implementation that left state in the ranks and whose cases alone may use them; empty if none
            did.
    """

    def __init__(self, key: WorldKey, devices: Sequence[int]) -> None:
        self.key = key
        self.reserved_for = ""
        self.devices = devices
        self._directory = scratch.directory("world-")
        try:
            self._board = Board(self._directory / BOARD, key.size)
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        self._announced: dict[int, list[Announcement]] = {}
        forkserver.start()
        self.ranks: list[RankProcess] = []
        try:
            for index in range(key.size):
                self.ranks.append(self._spawn(index))
            self._await_start()
        except BaseException:
            self.kill()
            raise

    def _spawn(self, index: int) -> RankProcess:
        context = forkserver.context()
        ours, theirs = context.Pipe()
        spec = RankSpec(self.key, index, str(self._directory), device_index=self.devices[index])
        process = context.Process(target=entry.main, args=(theirs, spec), daemon=True, name=f"rank {index}")
        try:
            forkserver.spawn(process, f"rank {index} of {self.key}")
        except BaseException as error:
            ours.close()
            if isinstance(error, forkserver.ForkserverEnded):
                raise WorldDied(str(error)) from None
            raise
        finally:
            theirs.close()
        return RankProcess(process, ours, self._directory / f"rank{index}.out")

    def _await_start(self) -> None:
        wait = Wait(
            f"the ranks of a world of {self.key} to start",
            bound=START_SECONDS,
            stopped_bound=START_SECONDS,
            blockers=self._starting,
        )
        for index, rank in enumerate(self.ranks):
            answer = ("failed", "it closed its connection")
            try:
                while not rank.connection.poll(_POLL_SECONDS):
                    wait.check()
                answer = rank.connection.recv()
            except WaitedTooLong:
                answer = ("failed", f"no answer within {START_SECONDS:g} s; it is {waiting.look_at(rank.process.pid)}")
            except (EOFError, OSError):
                pass
            if answer[0] != "ready":
                text = f"a world of {self.key} did not start: rank {index}: {answer[1]}\n{rank.new_output()}"
                raise WorldDied(bounded(text))

    def _starting(self) -> Blockers:
        """The ranks that have not answered; those that are ready wait in their loops."""
        silent = [rank.process.pid for rank in self.ranks if not rank.connection.poll()]
        processes = tuple(process for pid in silent if (process := waiting.look_at(pid)) is not None)
        return Blockers(processes, need_sigcont=any(process.is_stopped for process in processes))

    def run(self, job: Job) -> Outcome:
        """Run a case on all ranks and collect their results.

        Waits at most until the case's deadline and, after a first failure, at most ``GRACE_SECONDS`` longer. The world
        does not check whether its ranks are still in step; the caller decides that from the results.
        """
        started = time.monotonic()
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(job)
        self._announced = {}
        results = self._collect(job, started + job.deadline)
        if any(result.verdict != Verdict.PASS and not result.agreed for result in results):
            self._announced = self._announced or self._read_board(job)
        diagnosis = self._diagnose(job, results)
        seconds = time.monotonic() - started
        outputs = [rank.new_output() for rank in self.ranks]
        return Outcome(results, outputs, seconds, diagnosis, collectives(self._announced))

    def _read_board(self, job: Job) -> dict[int, list[Announcement]]:
        return {rank: self._board.entries(rank, job=job.number) for rank in range(self.key.size)}

    def _diagnose(self, job: Job, results: list[Result]) -> Diagnosis | None:
        stuck = {result.rank: result.text for result in results if result.verdict == Verdict.HANG}
        if not stuck:
            return None
        return diagnose(self._announced, stuck=stuck, case_path=job.path)

    def _collect(self, job: Job, until: float) -> list[Result]:
        results: dict[int, Result] = {}
        waiting: dict[Any, int] = {rank.connection: index for index, rank in enumerate(self.ranks)}
        failed = False
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                index = waiting.pop(connection)
                results[index] = self._receive(index, job)
                if results[index].verdict != Verdict.PASS and not failed:
                    failed = True
                    until = min(until, time.monotonic() + GRACE_SECONDS)
        if waiting:
            # Read the board before any stack dump is requested: the signal interrupts a rank's sleep, and the rank may
            # then continue.
            self._announced = self._read_board(job)
            stuck = {index: self.ranks[index] for index in waiting.values()}
            complete = dump_stacks({index: (rank.process.pid, rank.dumped) for index, rank in stuck.items()})
            for index in stuck:
                results[index] = self._stuck(index, job, after_failure=failed, is_complete=index in complete)
        return [results[index] for index in sorted(results)]

    def _receive(self, index: int, job: Job) -> Result:
        rank = self.ranks[index]
        try:
            result: Result = rank.connection.recv()
            if result.number == job.number:
                return result
            text = f"the rank answered job {result.number} during job {job.number}"
            return Result(job.number, index, Verdict.HARNESS_ERROR, text)
        except (EOFError, OSError):
            rank.process.join(timeout=1.0)
            code = rank.process.exitcode
            if code == _UNREPORTED and forkserver.has_ended(within=1.0):
                text = "the forkserver ended, and its ranks with it; the next case gets a new one"
                return Result(job.number, index, Verdict.HARNESS_ERROR, text)
            return Result(job.number, index, Verdict.CRASH, f"the rank's process ended: {_ending(code)}")

    def _stuck(self, index: int, job: Job, *, after_failure: bool, is_complete: bool) -> Result:
        rank = self.ranks[index]
        shown = stacks(rank.process.pid, rank.new_output(), is_complete=is_complete)
        if after_failure:
            text = f"the rank was still waiting {GRACE_SECONDS:g} s after another rank had failed"
        else:
            text = "the rank did not answer before the deadline"
        return Result(job.number, index, Verdict.HANG, f"{text}; its stacks:\n{shown}")

    @property
    def is_alive(self) -> bool:
        """Whether the processes of all ranks are running."""
        return all(rank.process.is_alive() for rank in self.ranks)

    def stop(self) -> None:
        """Ask the ranks to leave their loops, then kill those that have not exited; for a world that runs no case."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(None)
        self._join(_LEAVE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill every rank and the processes it started, and remove the world's directory."""
        for rank in self.ranks:
            if rank.process.is_alive():
                _kill_tree(rank.process.pid)
        self._await_end()
        for rank in self.ranks:
            rank.connection.close()
        self._board.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _await_end(self) -> None:
        """Wait until the killed ranks have ended, and give up those that do not end."""
        if self._join(_REPORT_SECONDS) and forkserver.kill_if_stopped():
            waiting.tell("shardproof: the forkserver was stopped and has been killed; the next case gets a new one")
        for rank in self._join(END_SECONDS):
            waiting.tell(
                f"shardproof: {rank.process.name}, {waiting.look_at(rank.process.pid)}, did not end within "
                f"{END_SECONDS:g} s of SIGKILL; it may keep its device and its memory"
            )
            # Otherwise the interpreter would wait for it when it exits, for ever.
            multiprocessing.process._children.discard(rank.process)  # type: ignore[attr-defined]

    def _join(self, seconds: float) -> list[RankProcess]:
        """Wait for the end of all ranks; return those that have not ended."""
        until = time.monotonic() + seconds
        for rank in self.ranks:
            rank.process.join(timeout=max(0.0, until - time.monotonic()))
        return [rank for rank in self.ranks if rank.process.is_alive()]


def _kill_tree(pid: int) -> None:
    """Kill a rank and the processes it started.

    A rank leads its own session, and so its own process group. A rank that is killed before it has created the session
    leads none: it is killed by its process id.
    """
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _ending(code: int | None) -> str:
    if code is None:
        return "it closed its connection and did not exit"
    if code < 0:
        hint = ", which the kernel also sends when memory runs out" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"
    return f"exit code {code}"
