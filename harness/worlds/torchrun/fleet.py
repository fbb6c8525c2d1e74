"""The processes of a torchrun job, as its controller sees them.

A link leads to each supervisor, ranks of a world live in its process, and the fleet is all of them.
"""

import contextlib
import dataclasses
import errno
import functools
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from shardproof.harness.worlds import forkserver
from shardproof.harness.worlds.forkserver import FORK_SECONDS
from shardproof.harness.worlds.jobs import Meeting, RankSpec
from shardproof.harness.worlds.torchrun import meeting
from shardproof.harness.worlds.torchrun.meeting import Channel, JobProcess
from shardproof.harness.worlds.waiting import Blockers, Wait, WaitedTooLong
from shardproof.runfile import Verdict

#: Seconds in which a supervisor answers. It has nothing to compute; a stack dump takes three seconds at most.
ANSWER_SECONDS = 10.0

_T = TypeVar("_T")


class Lost(Exception):
    """A supervisor cannot be reached; the message names its host.

    ``is_silent``: it stopped to answer, as after its host was cut off; otherwise its connection was closed, as after
    its process ended.
    """

    def __init__(self, text: str, *, is_silent: bool) -> None:
        super().__init__(text)
        self.is_silent = is_silent


class Link:
    """The connection with one supervisor, over which the controller asks and the supervisor answers.

    ``lost`` says why the supervisor cannot be reached; None while it can.
    """

    def __init__(self, connection: Channel, process: JobProcess) -> None:
        self.process = process
        self.lost: Lost | None = None
        self._connection = connection
        self._lock = threading.Lock()
        self._number = 0
        self._answers: dict[int, Any] = {}

    def ask(self, command: str, *arguments: Any) -> Callable[[float], Any]:
        """Send a command, and return a function that waits for the answer until a moment of ``time.monotonic``.

        That function raises ``Lost`` if there is none.
        """
        with self._lock:
            self._number += 1
            number = self._number
            if self.lost is None:
                try:
                    self._connection.send((number, command, arguments))
                except OSError as error:
                    self._lose(error)
        return functools.partial(self._take, number)

    def call(self, command: str, *arguments: Any, within: float = ANSWER_SECONDS) -> Any:
        """Send a command and return the answer; raises ``Lost`` if there is none."""
        return self.ask(command, *arguments)(time.monotonic() + within)

    def _take(self, number: int, until: float) -> Any:
        with self._lock:
            while number not in self._answers:
                if self.lost is not None:
                    raise self.lost
                try:
                    if self._connection.poll(max(0.0, until - time.monotonic())):
                        answered, value = self._connection.recv()
                        self._answers[answered] = value
                    else:
                        self._lose(None)
                except (EOFError, OSError) as error:
                    self._lose(error)
            return self._answers.pop(number)

    def _lose(self, error: BaseException | None) -> None:
        unreachable = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
        is_silent = error is None or isinstance(error, TimeoutError) or getattr(error, "errno", None) in unreachable
        if is_silent:
            text = f"host {self.process.host} does not answer: it is cut off, or its processes are stopped"
        else:
            text = f"host {self.process.host} closed its connection: the host or its processes ended"
        self.lost = Lost(text, is_silent=is_silent)
        # If it is there after all, it then learns that it is given up, and ends with its ranks.
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def gathered(asked: Mapping[int, Callable[[float], _T]], within: float = ANSWER_SECONDS) -> dict[int, _T]:
    """Wait for several answers at once; those of supervisors that cannot be reached are left out."""
    until = time.monotonic() + within
    answers: dict[int, _T] = {}
    for index, answer in asked.items():
        with contextlib.suppress(Lost):
            answers[index] = answer(until)
    return answers


@dataclasses.dataclass(eq=False)
class RemoteRank:
    """One rank of a world, whose process a supervisor has started; the connection is the controller's own with it."""

    link: Link
    world: int
    connection: Channel

    @property
    def is_alive(self) -> bool:
        """Whether the rank's connection is open, and its supervisor can be reached; asks nobody."""
        # Between cases a rank sends nothing: what could be read is the end of its connection.
        try:
            return self.link.lost is None and not self.connection.poll()
        except OSError:
            return False

    def new_output(self) -> str:
        """Return the output that the rank has written since the last call; "" if its host cannot be reached."""
        try:
            return str(self.link.call("output", self.world))
        except Lost:
            return ""

    def ending(self) -> tuple[Verdict, str]:
        """Return the verdict on a rank that has closed its connection, and how its process ended."""
        try:
            verdict, text = self.link.call("ending", self.world)
            return Verdict(verdict), text
        except Lost as lost:
            return (Verdict.HANG if lost.is_silent else Verdict.CRASH), str(lost)

    def ask(self, command: str, *arguments: Any) -> Callable[[float], Any]:
        """Ask the supervisor about this rank, as :meth:`Link.ask` does."""
        return self.link.ask(command, self.world, *arguments)


#: Seconds that the supervisors may take to come, after torch elastic has started all processes at the same time.
COME_SECONDS = 120.0

_POLL_SECONDS = 0.02


class TooFewRanks(Exception):
    """The job has too few ranks left for a world; the message is one line that names the hosts that it has lost."""


@dataclasses.dataclass(frozen=True)
class Seat:
    """One process of the job with at most one rank of each world; without a link it is the controller's own."""

    process: JobProcess
    link: Link | None = None


class Fleet:
    """All processes of a job; made by its controller, once. OSError without a free port or the job's store."""

    def __init__(self, process: JobProcess) -> None:
        self.process = process
        name, self._key = meeting.Keys(process).make()
        # Where the job's store outlives a restart, the keys of the last attempt's worlds are still there.
        self._name = secrets.token_hex(8)
        self._listening = meeting.listener(everywhere=process.nodes > 1)
        self._links: dict[int, Link] = {}
        self._connections: dict[tuple[int, int], Channel] = {}
        self._changed = threading.Condition()
        self._busy: set[int] = set()
        self._is_alone = False
        self._numbers = 0
        threading.Thread(target=self._accept, name="shardproof accepts", daemon=True).start()
        meeting.announce(process, self._listening.getsockname()[1], name)

    @property
    def size(self) -> int:
        """The number of ranks that torchrun started."""
        return self.process.size

    @property
    def lost(self) -> list[Lost]:
        """Why processes of the job cannot be reached, one for each."""
        return [link.lost for link in self._links.values() if link.lost is not None]

    def await_all(self) -> None:
        """Wait until all supervisors have come; a WaitedTooLong names the ranks of those that have not."""
        wait = Wait(
            "the other ranks of the job", bound=COME_SECONDS, blockers=Blockers,
            advice="see what torchrun prints on their hosts",
        )  # fmt: skip
        while self._missing():
            try:
                wait.check()
            except WaitedTooLong as error:
                missing = self._missing()
                raise WaitedTooLong(f"{error}; missing are ranks {', '.join(map(str, missing))} of the job") from None
            with self._changed:
                self._changed.wait(_POLL_SECONDS)

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self.size) if rank not in self._links]

    def reserve(self, size: int, *, known: Sequence[tuple[int, ...]] = (), alone: bool = False) -> tuple[int, ...]:
        """Take ranks of the job for a world, and return them; waits until the worlds that run leave enough.

        The first processes of ``known``, which have worlds that the case can use, are taken if they are free. With
        ``alone`` no other world of the job runs meanwhile.

        Raises:
            TooFewRanks: so many are not left.
            WaitedTooLong: a supervisor has not come.
        """
        self.await_all()
        with self._changed:
            while (processes := self._free(size, known, alone=alone)) is None:
                self._changed.wait(_POLL_SECONDS)
            self._busy |= {*processes}
            self._is_alone = alone
        return processes

    def release(self, processes: Collection[int]) -> None:
        """Give back what :meth:`reserve` returned."""
        with self._changed:
            self._busy -= {*processes}
            self._is_alone = False
            self._changed.notify_all()

    def _free(self, size: int, known: Sequence[tuple[int, ...]], *, alone: bool) -> tuple[int, ...] | None:
        left = [seat for seat in self.seats(range(self.size)) if seat.link is None or seat.link.lost is None]
        if size > len(left):
            why = "; ".join(dict.fromkeys(map(str, self.lost)))
            raise TooFewRanks(f"{size} ranks are needed, and {len(left)} of {self.size} are left: {why}")
        if self._is_alone or (alone and self._busy):
            return None
        free = [seat for seat in left if seat.process.rank not in self._busy]
        ranks = {seat.process.rank for seat in free}
        for processes in known:
            if ranks.issuperset(processes):
                return processes
        for node in dict.fromkeys(seat.process.node for seat in free):
            together = [seat.process.rank for seat in free if seat.process.node == node]
            if len(together) >= size:
                return tuple(together[:size])
        # On several hosts, where no single one has so many, and not only because others are busy.
        if any(
            sum(seat.process.node == node for seat in left) >= size for node in {seat.process.node for seat in left}
        ):
            return None
        return tuple(seat.process.rank for seat in free[:size]) if len(free) >= size else None

    @property
    def left(self) -> int:
        """The number of ranks that have not been lost."""
        return self.size - len(self.lost)

    def seats(self, processes: Iterable[int]) -> list[Seat]:
        """Return the seats of ranks of the job."""
        return [
            Seat(self._links[rank].process, self._links[rank]) if rank else Seat(self.process) for rank in processes
        ]

    def new_number(self) -> int:
        """Return a number for a new world."""
        with self._changed:
            self._numbers += 1
            return self._numbers

    def spawn(self, seat: Seat, number: int, spec: RankSpec) -> RemoteRank:
        """Start a rank in the process of another seat; raises ``Lost``, or ``ForkserverEnded`` if it did not start."""
        assert seat.link is not None, "the controller starts its own rank"
        refusal = seat.link.call("spawn", number, spec, within=FORK_SECONDS)
        if refusal:
            raise forkserver.ForkserverEnded(f"host {seat.process.host}: {refusal}")
        until = time.monotonic() + FORK_SECONDS
        with self._changed:
            while (connection := self._connections.pop((number, spec.index), None)) is None:
                if time.monotonic() > until:
                    text = f"host {seat.process.host}: rank {spec.index} did not connect within {FORK_SECONDS:.0f} s"
                    raise forkserver.ForkserverEnded(text)
                self._changed.wait(_POLL_SECONDS)
        return RemoteRank(seat.link, number, connection)

    def meeting(self, number: int) -> Meeting:
        """Return where the ranks of a world of several hosts meet."""
        return Meeting(self.process.master, self.process.port, f"shardproof/{self._name}/world{number}", self._key)

    def environment(self, index: int, seats: Sequence[Seat]) -> dict[str, str]:
        """Return the variables of a rank: those of torchrun, for its place in the world instead of in the job."""
        process = seats[index].process
        nodes = nodes_of(seats)
        return {
            "RANK": str(index), "WORLD_SIZE": str(len(seats)), "LOCAL_RANK": str(process.local_rank),
            "LOCAL_WORLD_SIZE": str(nodes.count(nodes[index])), "GROUP_RANK": str(nodes[index]),
            "GROUP_WORLD_SIZE": str(len(set(nodes))),
        }  # fmt: skip

    def directory(self, seat: Seat) -> pathlib.Path:
        """Make a directory for a world on the host of a seat; raises ``Lost`` if its supervisor cannot be reached."""
        assert seat.link is not None, "the controller makes its own directories"
        return pathlib.Path(seat.link.call("directory"))

    def close(self, exit_code: int) -> None:
        """End all supervisors, with the exit code of the job."""
        with contextlib.suppress(WaitedTooLong):
            self.await_all()
        gathered({rank: link.ask("end", exit_code) for rank, link in self._links.items()})
        self._listening.close()  # the links close with this process, for whose end the supervisors wait

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listening.accept(self._key)
            except OSError:
                return
            # Who stands between two processes can pass on their proofs and keep back the rest: then one thread waits.
            threading.Thread(target=self._welcome, args=(connection,), name="shardproof welcomes", daemon=True).start()

    def _welcome(self, connection: Channel) -> None:
        """Take what a process of the job says of itself first."""
        with contextlib.suppress(EOFError, OSError):
            hello = connection.recv()
            with self._changed:
                if isinstance(hello, JobProcess):
                    self._links[hello.rank] = Link(connection, hello)
                else:
                    self._connections[hello] = connection
                self._changed.notify_all()


def nodes_of(seats: Sequence[Seat]) -> tuple[int, ...]:
    """Return the host of each seat, numbered from 0 in the order of their first seats."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(seat.process.node, len(numbers)) for seat in seats)
