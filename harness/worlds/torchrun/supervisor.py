"""The supervisor: each process of a torchrun job but the controller's, which starts ranks and answers for them.

It runs no case and prints nothing. A rank that crashes or hangs costs its case; the supervisor, which torchrun watches,
goes on. Ranks and the controller send each other jobs and results over connections of their own.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from shardproof.harness.collectives.board import Announcement, Board
from shardproof.harness.worlds import flight_recorder, forkserver, rank_process, scratch
from shardproof.harness.worlds.jobs import BOARD, RankSpec
from shardproof.harness.worlds.rank_process import RankProcess
from shardproof.harness.worlds.torchrun import meeting
from shardproof.harness.worlds.torchrun.meeting import Channel, JobProcess
from shardproof.harness.worlds.waiting import WaitedTooLong
from shardproof.harness.worlds.watchdog import dump_stacks, stacks

#: The exit code of a supervisor that has lost its controller; torchrun then restarts the job, if it may.
LOST = 8

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

#: Seconds that the controller may take to exit after it has ended its run.
_LEAVE_SECONDS = 30.0


def main(process: JobProcess) -> int:
    """Serve the controller until it ends this process, and return the exit code of the job, which it sent."""
    # SIGTERM, with which torchrun ends processes, ends this one with what it has to clean up.
    for number in _SIGNALS:
        signal.signal(number, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun passes it on as SIGTERM's equal; the controller decides
    forkserver.start()
    supervisor = None
    try:
        address, key, connection = meeting.join(process)
        supervisor = Supervisor(address, key)
        connection.send(process)
        return supervisor.serve(connection)
    except (EOFError, OSError, RuntimeError) as error:
        why = str(error) or "its connection was closed"
        print(f"shardproof: rank {process.rank} on host {process.host} lost the controller: {why}", file=sys.stderr)
        return LOST
    finally:
        if supervisor is not None:
            supervisor.close()
        # From here on the process only exits.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    sys.exit(128 + number)


@dataclasses.dataclass
class _Held:
    rank: RankProcess
    board: Board
    index: int


class Supervisor:
    """Starts ranks, and answers the controller's questions about them."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._address = address
        self._key = key
        self._held: dict[int, _Held] = {}
        self._directories: set[pathlib.Path] = set()

    def serve(self, connection: Channel) -> int:
        """Answer until the controller sends the end, with the job's exit code; EOFError or OSError if it is gone."""
        while True:
            number, command, arguments = connection.recv()
            answer = self.answer(command, *arguments)
            connection.send((number, answer))
            if command == "end":
                # Until the controller has ended: torchrun ends all others with the first process that fails.
                with contextlib.suppress(EOFError, OSError):
                    if connection.poll(_LEAVE_SECONDS):
                        connection.recv()
                return int(arguments[0])

    def answer(self, command: str, *arguments: Any) -> Any:
        """Answer one command of the controller."""
        answers: dict[str, Callable[..., Any]] = {
            "directory": self._directory, "spawn": self._spawn,
            "output": lambda number: self._held[number].rank.new_output(), "announced": self._announced,
            "flight": self._flight, "stacks": self._stacks, "ending": self._ending, "abort": self._abort,
            "kill": self._kill, "end": lambda exit_code: None,
        }  # fmt: skip
        return answers[command](*arguments)

    def close(self) -> None:
        """Kill all ranks."""
        for number in [*self._held]:
            self._kill(number)

    def _directory(self) -> str:
        path = scratch.directory("world-")
        self._directories.add(path)
        return str(path)

    def _spawn(self, number: int, spec: RankSpec) -> str:
        """Start a rank; return why it did not start, or ""."""
        folder = pathlib.Path(spec.directory)
        try:
            board = Board(folder / BOARD, spec.key.size)
            theirs = meeting.connect(self._address, self._key)
            theirs.send((number, spec.index))
            process = rank_process.spawn(spec, theirs)
        except (OSError, WaitedTooLong, forkserver.ForkserverEnded) as error:
            return f"{error}"
        self._held[number] = _Held(RankProcess(process, None, folder / f"rank{spec.index}.out"), board, spec.index)
        return ""

    def _announced(self, number: int, job: int) -> list[Announcement]:
        held = self._held[number]
        return held.board.entries(held.index, job=job)

    def _flight(self, number: int) -> bytes:
        held = self._held[number]
        return flight_recorder.dumps(held.rank.output.parent, [held.index]).get(held.index, b"")

    def _stacks(self, number: int) -> str:
        rank = self._held[number].rank
        complete = dump_stacks({0: (rank.process.pid, rank.dumped)})
        return stacks(rank.process.pid, rank.new_output(), is_complete=bool(complete))

    def _ending(self, number: int) -> tuple[str, str]:
        verdict, text = self._held[number].rank.ending()
        return str(verdict), text

    def _abort(self, number: int) -> None:
        if number in self._held:  # else its world has ended meanwhile
            rank_process.kill([self._held[number].rank])

    def _kill(self, number: int) -> list[str]:
        held = self._held.pop(number, None)
        if held is None:
            return []
        lines = rank_process.kill([held.rank])
        held.board.close()
        folder = held.rank.output.parent
        if folder in self._directories:
            self._directories.remove(folder)
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
        return lines
