"""Leases on the devices and cores that the pytest processes of a host share, such as xdist's workers.

A process runs a case only while it holds a lease on the devices of the case's world. Each device has a fixed number of
slots, and each slot is a lock file. A correctness case takes one slot of each of its devices; a case that measures
takes all of them. Processes queue for the right to take slots. The process at the head of the queue takes either all
the slots that it needs or none, so no process holds some slots while it waits for others. The kernel releases the locks
of a process that dies. A process writes its id into the files that it has locked, so that those that wait for it can
name it.
"""

import contextlib
import fcntl
import os
import pathlib
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from shardproof.harness.worlds import waiting
from shardproof.harness.worlds.waiting import Blockers, Process, Wait

#: Cases that may use one GPU at the same time. Measured: four concurrent worlds did four times the work in 2.4 times
#: the time. Ranks also start within a lease, which is work of the host alone: where it has many cores, more cases may
#: run. It depends on the host alone, because all its processes must agree.
DEVICE_SLOTS = min(8, max(4, (os.cpu_count() or 4) // 4))

#: Seconds between the attempts of the process at the head of the queue to take its slots.
_POLL_SECONDS = 0.002

#: Seconds after which a process gives up its wait for a lease. Each case has a deadline, and a queue of many workers is
#: legal, so a wait this long means that something is wrong. A holder that is stopped is given up earlier, after
#: ``waiting.STOPPED_SECONDS``.
LEASE_SECONDS = 1800.0

_REASON = "which another run of shardproof on this machine, or another worker of this run, uses"
_ADVICE = "if it hangs, end it; if it only has much to do, run fewer pytest processes at once"

_Takes = Sequence[tuple[Sequence[str], int]]
"""Pairs of lock file names and how many of them to lock."""


def device_of(worker: int, *, size: int, count: int) -> list[int]:
    """Assign devices to the ranks of a world, so that the worlds of different workers start on different devices.

    Ranks share devices where ``size`` exceeds ``count``, the number of devices of the host.
    """
    offset = worker * size % count
    return [(offset + index) % count for index in range(size)]


class Leases:
    """The device and core locks of one user on this host; ValueError if others may write to the directory."""

    def __init__(self, directory: pathlib.Path | None = None) -> None:
        self._directory = directory or pathlib.Path(tempfile.gettempdir(), f"shardproof-leases-{os.getuid()}")
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self._directory.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
            raise ValueError(f"{self._directory} must be a directory that you own and that nobody else may write to")
        self._given_up: set[Process] = set()
        self._told: set[str] = set()

    @contextlib.contextmanager
    def devices(self, indices: Sequence[int], *, alone: bool) -> Iterator[None]:
        """Hold a lease on devices; with ``alone`` on all of their slots, so that no other case uses them.

        A WaitedTooLong says that the lease did not come within ``LEASE_SECONDS``, or that its holder is stopped.
        """
        chosen = sorted(set(indices))
        needs = [[f"device-{index}.{slot}" for slot in range(DEVICE_SLOTS)] for index in chosen]
        takes = [(slots, len(slots) if alone else 1) for slots in needs]
        with self._hold(takes, f"a lease on device{'s' * (len(chosen) > 1)} {', '.join(map(str, chosen))}"):
            yield

    @contextlib.contextmanager
    def cores(self, ranks: int, *, alone: bool) -> Iterator[None]:
        """Hold a lease on one CPU core for each rank; a world with more ranks than cores takes all cores."""
        cores = [f"core-{index}.0" for index in sorted(os.sched_getaffinity(0))]
        wanted = len(cores) if alone else min(ranks, len(cores))
        with self._hold([(cores, wanted)], f"a lease on {wanted} core{'s' * (wanted > 1)}"):
            yield

    @contextlib.contextmanager
    def _hold(self, takes: _Takes, what: str) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            with self._head_of_queue(what):
                wait = self._wait(what, lambda: self._holders(takes))
                while not self._try_all(takes, held):
                    wait.check()
                    time.sleep(_POLL_SECONDS)
            yield

    def _wait(self, what: str, blockers: Callable[[], Blockers]) -> Wait:
        return Wait(
            f"{what} (lock files in {self._directory})", bound=LEASE_SECONDS, blockers=blockers,
            given_up=self._given_up, advice=_ADVICE, told=self._told, reason=_REASON,
        )  # fmt: skip

    @contextlib.contextmanager
    def _head_of_queue(self, what: str) -> Iterator[None]:
        with contextlib.ExitStack() as lock:
            descriptor = lock.enter_context(self._opened("queue"))
            if not _try_lock(descriptor):
                wait = self._wait(f"the head of the queue for {what}", lambda: self._holders([(["queue"], 1)]))
                self._await_lock(descriptor, wait)
            _sign(descriptor)
            yield

    def _await_lock(self, descriptor: int, wait: Wait) -> None:
        """Wait for a lock in the kernel's queue, which is fair, where repeated attempts would not be."""
        # The lock belongs to the open file, which both descriptors share. A thread that still waits when this wait is
        # over has a descriptor of its own, and releases the lock if it ever gets it.
        copy = os.dup(descriptor)

        def lock() -> int:
            try:
                fcntl.flock(copy, fcntl.LOCK_EX)
            except BaseException:
                os.close(copy)
                raise
            return copy

        os.close(waiting.in_thread(lock, wait, discard=os.close))

    def _try_all(self, takes: _Takes, held: contextlib.ExitStack) -> bool:
        """Lock the requested number of files of each list, which go into ``held``, or none of them."""
        with contextlib.ExitStack() as attempt:
            locked = []
            for names, wanted in takes:
                for name in names:
                    if wanted and (descriptor := self._try(name, attempt)) is not None:
                        locked.append(descriptor)
                        wanted -= 1
                if wanted:
                    return False
            for descriptor in locked:
                _sign(descriptor)
            held.push(attempt.pop_all())
            return True

    def _try(self, name: str, attempt: contextlib.ExitStack) -> int | None:
        with contextlib.ExitStack() as opened:
            descriptor = opened.enter_context(self._opened(name))
            if not _try_lock(descriptor):
                return None
            attempt.push(opened.pop_all())
            return descriptor

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        descriptor = os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _holders(self, takes: _Takes) -> Blockers:
        processes: dict[int, Process] = {}
        need_sigcont = False
        for names, wanted in takes:
            with contextlib.ExitStack() as attempt:
                taken = [name for name in names if self._try(name, attempt) is None]
            holders = [holder for name in taken if (holder := self._holder(name)) is not None]
            processes |= {holder.pid: holder for holder in holders}
            need_sigcont |= len(names) - sum(holder.is_stopped for holder in holders) < wanted
        return Blockers(tuple(processes.values()), need_sigcont)

    def _holder(self, name: str) -> Process | None:
        """Return the process that holds a lock file, if it can be seen from here.

        The id in the file may be that of an earlier holder, or of a process in another container.
        """
        path = self._directory / name
        try:
            process = waiting.look_at(int(path.read_text()))
            if process is None:
                return None
            links = [os.path.realpath(link) for link in pathlib.Path(f"/proc/{process.pid}/fd").iterdir()]
        except (ValueError, OSError):
            return None
        return process if os.path.realpath(path) in links else None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(descriptor: int) -> None:
    """Write this process's id into a file that it has locked."""
    os.pwrite(descriptor, f"{os.getpid():<20}\n".encode(), 0)
