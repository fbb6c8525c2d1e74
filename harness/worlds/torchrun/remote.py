"""The controller's handles of what lives in other processes of a torchrun job: a link to each supervisor, and ranks."""

from __future__ import annotations

import contextlib
import errno
import functools
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from shardproof.harness.collectives.board import Announcement
from shardproof.harness.worlds.jobs import RankSpec
from shardproof.harness.worlds.torchrun.roles import Place
from shardproof.runfile import Verdict

#: Seconds in which a supervisor answers. It has nothing to compute; a stack dump takes three seconds at most.
ANSWER_SECONDS = 10.0

_T = TypeVar("_T")


class Lost(Exception):
    """A supervisor cannot be reached; the message names its host.

    Args:
        text: why, in one line.
        is_silent: whether it stopped to answer, as after its host was cut off; otherwise its connection was closed, as
            after its process ended.
    """

    def __init__(self, text: str, *, is_silent: bool) -> None:
        super().__init__(text)
        self.is_silent = is_silent


class Link:
    """The connection with one supervisor, over which the controller asks and the supervisor answers.

    Args:
        connection: the connection.
        place: the supervisor's place in the job.

    Attributes:
        place: the supervisor's place in the job.
        lost: why the supervisor cannot be reached; None while it can.
    """

    def __init__(self, connection: Connection, place: Place) -> None:
        self.place = place
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
        """Send a command and wait for the answer.

        Raises:
            Lost: there is none.
        """
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
        is_silent = error is None or isinstance(error, TimeoutError) or _is_unreachable(error)
        if is_silent:
            text = f"host {self.place.host} does not answer: it is cut off, or its processes are stopped"
        else:
            text = f"host {self.place.host} closed its connection: the host or its processes ended"
        self.lost = Lost(text, is_silent=is_silent)
        # If it is there after all, it then learns that it is given up, and ends with its ranks.
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _is_unreachable(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


def gathered(asked: Mapping[int, Callable[[float], _T]], within: float = ANSWER_SECONDS) -> dict[int, _T]:
    """Wait for several answers at once; those of supervisors that cannot be reached are left out."""
    until = time.monotonic() + within
    answers: dict[int, _T] = {}
    for index, answer in asked.items():
        with contextlib.suppress(Lost):
            answers[index] = answer(until)
    return answers


class RemoteRank:
    """One rank of a world, whose process a supervisor has started.

    Args:
        link: the connection with the supervisor.
        world: the number of the world.
        spec: which rank of which world it is.
        connection: the controller's own connection with the rank.
    """

    def __init__(self, link: Link, world: int, spec: RankSpec, connection: Connection) -> None:
        self.link = link
        self.connection = connection
        self._world = world
        self._spec = spec

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
            return str(self.link.call("output", self._world))
        except Lost:
            return ""

    def ending(self) -> tuple[Verdict, str]:
        """Return the verdict on a rank that has closed its connection, and how its process ended."""
        try:
            verdict, text = self.link.call("ending", self._world)
            return Verdict(verdict), text
        except Lost as lost:
            return (Verdict.HANG if lost.is_silent else Verdict.CRASH), str(lost)

    def ask_announced(self, job: int) -> Callable[[float], list[Announcement]]:
        """Ask for the rank's announcements in a job."""
        return self.link.ask("announced", self._world, job)

    def ask_stacks(self) -> Callable[[float], str]:
        """Ask for the rank's stacks, rendered."""
        return self.link.ask("stacks", self._world)

    def ask_abort(self) -> Callable[[float], None]:
        """Ask to kill the rank, about which there may still be questions."""
        return self.link.ask("abort", self._world)

    def ask_kill(self) -> Callable[[float], list[str]]:
        """Ask to kill the rank; the answer has a line for each process that did not end."""
        return self.link.ask("kill", self._world)
