"""Waiting of the controller that is visible and bounded.

After some seconds a line says for what the controller waits, which processes are in the way, in which state they are,
and when the wait ends. Imports no torch.
"""

import contextlib
import dataclasses
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

#: Seconds of waiting before the first line; each further line comes after twice the time of the one before.
NOTICE_SECONDS = 5.0

#: Seconds before the first line of a wait like one that has had its lines: the next case waits for the same reason.
AGAIN_SECONDS = 60.0

#: Seconds after which a wait is given up because every process that could end it is stopped. Such a process continues
#: only if somebody continues it: time to read the line and to do so.
STOPPED_SECONDS = 60.0

#: Seconds between two looks at the processes in the way, and the most that the time between two calls of
#: :meth:`Wait.check` counts: while this process itself was stopped, it did not wait.
_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.1

_STATES = {
    "R": "running", "S": "sleeping", "D": "uninterruptible sleep", "T": "stopped", "t": "stopped by a debugger",
    "Z": "ended, not yet reaped", "X": "ended",
}  # fmt: skip

_T = TypeVar("_T")


class WaitedTooLong(Exception):
    """A wait was given up; the message is one line that names what was waited for, who is in the way and what to do."""


def tell_on_stderr(line: str) -> None:
    """Write a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)


#: Shows a line to the user while a case runs. The plugin replaces it, because pytest captures stderr meanwhile.
tell: Callable[[str], None] = tell_on_stderr


@dataclasses.dataclass(frozen=True)
class Process:
    """A process of this host at one moment.

    ``state`` is a letter of ``/proc/PID/stat``, and ``started`` tells it from an earlier process with the same id.
    """

    pid: int
    name: str
    state: str
    started: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name}, {_STATES.get(self.state, self.state)})"

    @property
    def is_stopped(self) -> bool:
        """Whether the process runs nothing until it gets SIGCONT."""
        return self.state == "T"

    @property
    def has_ended(self) -> bool:
        """Whether the process is only an entry that its parent has not yet reaped."""
        return self.state in "ZX"


def look_at(pid: int) -> Process | None:
    """Return the process with this id, or None if there is none that this process can see."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name is in parentheses and may itself contain parentheses and spaces.
    head, _, rest = text.rpartition(") ")
    fields = rest.split()
    return Process(pid, head.partition(" (")[2], fields[0], fields[19])


@dataclasses.dataclass(frozen=True)
class Blockers:
    """The processes in the way of a wait that can be named; with ``need_sigcont`` a stopped one must continue first."""

    processes: tuple[Process, ...] = ()
    need_sigcont: bool = False

    def __str__(self) -> str:
        return ", ".join(map(str, self.processes)) or "a process that is not visible here"


@dataclasses.dataclass(eq=False)
class Wait:
    """One wait: call :meth:`check` at each poll."""

    what: str  # what is waited for, such as "a lease on 2 cores"
    _: dataclasses.KW_ONLY
    bound: float  # the seconds after which the wait is given up
    blockers: Callable[[], Blockers]
    # The seconds after which it is given up while only a stopped process could end it.
    stopped_bound: float | None = None
    # The stopped processes for which earlier waits were given up, and this one is at once, so that each further case
    # does not wait as long as the first; receives those of this wait.
    given_up: set[Process] = dataclasses.field(default_factory=set)
    # The reasons of earlier waits that have had a line; receives that of this one.
    told: set[str] = dataclasses.field(default_factory=set)
    reason: str = ""  # in plain words, why there is a wait
    advice: str = "end it if it hangs"  # what to do when the wait is given up, or what happens then
    stopped_advice: str = ""  # the same if a stopped process was in the way; by default to continue or to end it

    def __post_init__(self) -> None:
        self._stopped_bound = STOPPED_SECONDS if self.stopped_bound is None else self.stopped_bound
        self._waited, self._last = 0.0, time.monotonic()
        first_look = min(NOTICE_SECONDS, self.bound)
        self._next_line = AGAIN_SECONDS if self.reason in self.told else first_look
        self._next_look = 0.0 if self.given_up else first_look
        self._stopped_from: float | None = None

    def check(self) -> None:
        """Count the time since the last call, and show a line if one is due; WaitedTooLong at the bound."""
        now = time.monotonic()
        self._waited += min(now - self._last, _LOOK_SECONDS)
        self._last = now
        if self._waited >= self._next_look:
            self._next_look = self._waited + min(_LOOK_SECONDS, NOTICE_SECONDS)
            self._look(self.blockers())

    def _look(self, blockers: Blockers) -> None:
        has_changed = blockers.need_sigcont != (self._stopped_from is not None)
        if has_changed:
            self._stopped_from = self._waited if blockers.need_sigcont else None
        remaining = self.bound - self._waited
        if self._stopped_from is not None:
            remaining = min(remaining, self._stopped_from + self._stopped_bound - self._waited)
        if blockers.need_sigcont and not self.given_up.isdisjoint(blockers.processes):
            remaining = 0.0
        if remaining <= 0:
            self.given_up.update(process for process in blockers.processes if process.is_stopped)
            advice = self.advice
            if blockers.need_sigcont:
                pid = next(process.pid for process in blockers.processes if process.is_stopped)
                advice = self.stopped_advice or f"continue it (kill -CONT {pid}) or end it"
            raise WaitedTooLong(
                f"gave up after {self._waited:.0f} s of waiting for {self.what}, held up by {blockers}: {advice}"
            )
        if self._waited >= self._next_line or (has_changed and self._waited >= NOTICE_SECONDS):
            self._next_line = max(2 * self._waited, NOTICE_SECONDS)
            reason = f", {self.reason}" if self.reason and self.reason not in self.told else ""
            self.told.update(filter(None, [self.reason]))
            tell(
                f"shardproof: waiting for {self.what}{reason}: {self._waited:.0f} s so far, held up by {blockers}; "
                f"timeout in {remaining:.0f} s"
            )


def in_thread(function: Callable[[], _T], wait: Wait, *, discard: Callable[[_T], None]) -> _T:
    """Call a function that may block for ever, in a thread, and wait for it.

    It keeps running when the wait is given up or interrupted; ``discard`` then undoes what it returns.
    """
    #: Its value belongs to the waiting thread or, once that has cancelled it, to ``discard``.
    call: Future[_T] = Future()

    def run() -> None:
        try:
            value = function()
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):
                call.set_exception(error)
        else:
            try:
                call.set_result(value)
            except InvalidStateError:
                discard(value)

    threading.Thread(target=run, name="shardproof waits", daemon=True).start()
    try:
        while not futures.wait([call], _POLL_SECONDS).done:
            wait.check()
    except BaseException:
        if not call.cancel() and call.exception() is None:
            discard(call.result())
        raise
    return call.result()
