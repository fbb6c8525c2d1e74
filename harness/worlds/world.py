"""The controller's side of a world and of its rank processes."""

import contextlib
import dataclasses
import pathlib
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from shardproof.harness.collectives.board import Announcement, Board
from shardproof.harness.collectives.trace import without_own_bytes
from shardproof.harness.judging.texts import bounded, frames_of
from shardproof.harness.worlds import flight_recorder, forkserver, rank_process, scratch, waiting
from shardproof.harness.worlds.jobs import BOARD, Job, RankSpec, Result, RollCall, WorldKey
from shardproof.harness.worlds.rank_process import RankProcess
from shardproof.harness.worlds.torchrun.fleet import ANSWER_SECONDS, Fleet, Lost, RemoteRank, Seat, gathered, nodes_of
from shardproof.harness.worlds.waiting import Blockers, Wait, WaitedTooLong
from shardproof.harness.worlds.watchdog import HangDiagnosis, collectives, diagnose, dump_stacks, stacks
from shardproof.runfile import Verdict

# Whether the ranks of a world have done the same in a case, so that they can run another one.


def by_agreement(results: Sequence[Result]) -> bool:
    """Whether all ranks passed, or all failed by agreement, and none left state behind."""
    passed = all(result.verdict in (Verdict.PASS, Verdict.UNSUPPORTED) for result in results)
    return (passed or all(result.agreed for result in results)) and not any(result.left_behind for result in results)


def failed_alike(results: Sequence[Result]) -> bool:
    """Whether an exception came from the same lines of code on all ranks, and none left state behind."""
    frames = [frames_of(result.text) for result in results]
    raised = all(result.verdict == Verdict.FAIL and not result.agreed for result in results) and all(frames)
    return raised and all(one == frames[0] for one in frames) and not any(result.left_behind for result in results)


def announced_alike(entries: Mapping[int, Sequence[Announcement]]) -> bool:
    """Whether the last collective on each group was the same one for all of its members.

    A group on which a rank issued nothing among its last announcements counts as one on which its members differ.
    """
    last = {rank: {entry.group: entry for entry in own} for rank, own in entries.items()}
    return all(
        (theirs := last[peer].get(group)) is not None and _identity(theirs) == _identity(entry)
        for own in last.values()
        for group, entry in own.items()
        for peer in entry.ranks
    )


def _identity(entry: Announcement) -> tuple[int, str]:
    return entry.number, without_own_bytes(entry.text)


#: Seconds that the ranks may take from the fork to the first barrier, including device contexts and process groups.
START_SECONDS = 120.0

#: Seconds that the other ranks may take to finish after one rank failed; after that they count as waiting for it.
GRACE_SECONDS = 2.0

#: Seconds that the ranks may take to leave their loops when they are asked to, all together.
_LEAVE_SECONDS = 2.0

#: Seconds between two looks at whether a starting world waits too long; an answer is received at once.
_POLL_SECONDS = 0.1


@dataclasses.dataclass
class Outcome:
    """The outcome of a job on a world."""

    results: list[Result]  # one result for each rank, in rank order
    outputs: list[str]  # the end of what each rank wrote to stdout and stderr
    seconds: float  # wall-clock time of the job, without the wait for a lease and the start of the world
    diagnosis: HangDiagnosis | None = None
    # The last collectives of the ranks, rendered, if they did not all pass or fail by agreement.
    collectives: list[str] = dataclasses.field(default_factory=list)
    hosts: tuple[str, ...] = ()  # the name of the host of each rank; empty if all are on one
    # What torch's flight recorder has, by rank, as torch pickles it; after a hang on NCCL.
    dumps: dict[int, bytes] = dataclasses.field(default_factory=dict)


class WorldDied(Exception):
    """A world could not be started; the message contains the answer and the output of the rank that failed."""


class World:
    """The ranks of one world; the constructor starts them and waits until they are ready.

    Args:
        fleet: the torchrun job in whose processes the ranks live; None if all are children of this process.

    Raises:
        WorldDied: a rank did not start.
        OSError: there is no space for the world's directory.
        WaitedTooLong: the forkserver did not start a rank in time.

    Attributes:
        reserved_for: the implementation that left state in the ranks and whose cases alone may use them; empty if none
            did.
    """

    def __init__(
        self, key: WorldKey, devices: Sequence[int], *, fleet: Fleet | None = None, seats: Sequence[Seat] = ()
    ) -> None:
        self.key = key
        self.reserved_for = ""
        self.devices = devices
        self.hosts = tuple(seat.process.host for seat in seats) if len(set(nodes_of(seats))) > 1 else ()
        self._directory = scratch.directory("world-")
        try:
            self._board = Board(self._directory / BOARD, key.size)
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        self._announced: dict[int, list[Announcement]] = {}
        self._dumps: dict[int, bytes] = {}
        forkserver.start()
        self.ranks: list[RankProcess | RemoteRank] = []
        try:
            self._start(fleet, seats)
            self._await_start()
        except BaseException as error:
            self.kill()
            if isinstance(error, (Lost, forkserver.ForkserverEnded)):
                raise WorldDied(str(error)) from None
            raise

    def _start(self, fleet: Fleet | None, seats: Sequence[Seat]) -> None:
        if fleet is None:
            for index in range(self.key.size):
                self.ranks.append(self._spawn(self._spec(index)))
            return
        number = fleet.new_number()
        directories: dict[int, pathlib.Path] = {fleet.process.node: self._directory}
        for index, seat in enumerate(seats):
            node = seat.process.node
            if node not in directories:
                directories[node] = fleet.directory(seat)
            spec = dataclasses.replace(
                self._spec(index),
                directory=str(directories[node]),
                nodes=nodes_of(seats),
                meeting=fleet.meeting(number) if self.hosts else None,
                environment=fleet.environment(index, seats),
                search_path=tuple(sys.path),
                # As torchrun started the process that forks it: with a seed of its own, unless the job sets one.
                hash_seed=None,
            )
            self.ranks.append(self._spawn(spec) if seat.link is None else fleet.spawn(seat, number, spec))

    def _spec(self, index: int) -> RankSpec:
        # Not 0, which would make hashes those of no seed; and fixed, so that what a case finds it finds again.
        seed = index + 1 if self.key.own_hash_seeds else None
        return RankSpec(self.key, index, str(self._directory), device_index=self.devices[index], hash_seed=seed)

    def _spawn(self, spec: RankSpec) -> RankProcess:
        ours, theirs = forkserver.context().Pipe()
        try:
            process = rank_process.spawn(spec, theirs)
        except BaseException:
            ours.close()
            raise
        return RankProcess(process, ours, self._directory / f"rank{spec.index}.out")

    @property
    def _own(self) -> dict[int, RankProcess]:
        return {index: rank for index, rank in enumerate(self.ranks) if isinstance(rank, RankProcess)}

    @property
    def _remote(self) -> dict[int, RemoteRank]:
        return {index: rank for index, rank in enumerate(self.ranks) if isinstance(rank, RemoteRank)}

    @property
    def _lost(self) -> dict[int, str]:
        return {index: str(rank.link.lost) for index, rank in self._remote.items() if rank.link.lost is not None}

    def _await_start(self) -> None:
        wait = Wait(
            f"the ranks of a world of {self.key} to start", bound=START_SECONDS, stopped_bound=START_SECONDS,
            blockers=self._starting,
        )  # fmt: skip
        for index, rank in enumerate(self.ranks):
            answer = ("failed", "it closed its connection")
            try:
                while not rank.connection.poll(_POLL_SECONDS):
                    wait.check()
                answer = rank.connection.recv()
            except WaitedTooLong:
                who = f"; it is {waiting.look_at(rank.process.pid)}" if isinstance(rank, RankProcess) else ""
                answer = ("failed", f"no answer within {START_SECONDS:g} s{who}")
            except (EOFError, OSError):
                pass
            if answer[0] != "ready":
                text = f"a world of {self.key} did not start: rank {index}: {answer[1]}\n{rank.new_output()}"
                raise WorldDied(bounded(text))

    def _starting(self) -> Blockers:
        """The ranks that have not answered; those that are ready wait in their loops."""
        silent = [rank.process.pid for rank in self._own.values() if not rank.connection.poll()]
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
        self._announced, self._dumps = {}, {}
        results = self._collect(job, started + job.deadline)
        if any(result.verdict != Verdict.PASS and not result.agreed for result in results):
            self._announced = self._announced or self._read_board(job)
        diagnosis = None
        if stuck := {result.rank: result.text for result in results if result.verdict == Verdict.HANG}:
            diagnosis = diagnose(self._announced, stuck=stuck, case_path=job.path, lost=self._lost)
        seconds = time.monotonic() - started
        outputs = [rank.new_output() for rank in self.ranks]
        last = collectives(self._announced, self._lost)
        return Outcome(results, outputs, seconds, diagnosis, last, self.hosts, self._dumps)

    def is_in_step(self, results: Sequence[Result]) -> bool:
        """Whether the ranks can run another case after these results of the job that ran last.

        If an exception came from the same place on all ranks after the same collectives, this asks them, and waits for
        the answers at most ``GRACE_SECONDS``. A case that stopped the forkserver has broken more than its world, whose
        end replaces both.
        """
        if by_agreement(results):
            return True
        alike = failed_alike(results) and announced_alike(self._announced)
        return alike and not forkserver.is_stopped() and self._answers(RollCall(results[0].number))

    def _answers(self, call: RollCall) -> bool:
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(call)
        until = time.monotonic() + GRACE_SECONDS
        asked: dict[Any, int] = {rank.connection: index for index, rank in enumerate(self.ranks)}
        while asked and (ready := wait(list(asked), timeout=max(0.0, until - time.monotonic()))):
            for connection in ready:
                if self._receive(asked.pop(connection), call).verdict != Verdict.PASS:
                    return False
        return not asked

    def _read_board(self, job: Job) -> dict[int, list[Announcement]]:
        asked = {index: rank.ask("announced", job.number) for index, rank in self._remote.items()}
        entries = {index: self._board.entries(index, job=job.number) for index in self._own}
        entries |= gathered(asked)
        return {index: entries.get(index, []) for index in range(self.key.size)}

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
            stuck = set(waiting.values())
            if not failed:
                self._dumps = self._flight_recorders()
            shown = self._stacks(stuck)
            text = "the rank did not answer before the deadline"
            if failed:
                text = f"the rank was still waiting {GRACE_SECONDS:g} s after another rank had failed"
            for index in stuck:
                why = f"; its stacks:\n{shown[index]}" if index in shown else f": {self._lost[index]}"
                results[index] = Result(job.number, index, Verdict.HANG, text + why)
        return [results[index] for index in sorted(results)]

    def _flight_recorders(self) -> dict[int, bytes]:
        """Return the dumps of torch's flight recorders, also of ranks that have answered: one of them may be behind."""
        asked = {index: rank.ask("flight") for index, rank in self._remote.items()}
        own = flight_recorder.dumps(self._directory, self._own)
        return own | {index: dump for index, dump in gathered(asked).items() if dump}

    def _stacks(self, stuck: Collection[int]) -> dict[int, str]:
        """Return the stacks of ranks, rendered; ranks whose supervisor cannot be reached are left out."""
        asked = {index: rank.ask("stacks") for index, rank in self._remote.items() if index in stuck}
        own = {index: rank for index, rank in self._own.items() if index in stuck}
        complete = dump_stacks({index: (rank.process.pid, rank.dumped) for index, rank in own.items()})
        shown = {
            index: stacks(rank.process.pid, rank.new_output(), is_complete=index in complete)
            for index, rank in own.items()
        }
        return shown | gathered(asked)

    def _receive(self, index: int, job: Job | RollCall) -> Result:
        rank = self.ranks[index]
        try:
            result: Result = rank.connection.recv()
            if result.number == job.number:
                return result
            text = f"the rank answered job {result.number} during job {job.number}"
            return Result(job.number, index, Verdict.HARNESS_ERROR, text)
        except (EOFError, OSError):
            verdict, text = rank.ending()
            return Result(job.number, index, verdict, text)

    @property
    def is_alive(self) -> bool:
        """Whether the processes of all ranks are running."""
        return all(rank.is_alive for rank in self.ranks)

    def stop(self) -> None:
        """Ask the ranks to leave their loops, then kill those that have not exited; for a world that runs no case."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(None)
        rank_process.join([*self._own.values()], _LEAVE_SECONDS)
        self.kill()

    def abort(self) -> None:
        """Kill every rank while another thread waits for their results, which are crashes then."""
        asked = {index: rank.ask("abort") for index, rank in self._remote.items()}
        rank_process.kill([*self._own.values()])
        gathered(asked, rank_process.END_SECONDS + ANSWER_SECONDS)

    def kill(self) -> None:
        """Kill every rank and the processes it started, and remove the world's directory."""
        asked = {index: rank.ask("kill") for index, rank in self._remote.items()}
        lines = rank_process.kill([*self._own.values()])
        for answer in gathered(asked, rank_process.END_SECONDS + ANSWER_SECONDS).values():
            lines += answer
        for line in lines:
            waiting.tell(line)
        for rank in self.ranks:
            rank.connection.close()
        self._board.close()
        shutil.rmtree(self._directory, ignore_errors=True)
