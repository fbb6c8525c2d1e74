"""Devices and cores shared among the pytest processes of a host, such as xdist's workers.

A case runs while its world's devices are leased: each device has a number of slots, a slot is a
locked file, a correctness case takes one slot of each of its devices and a case that measures takes
them all. Processes queue for the right to take slots, and the first in the queue takes its whole set
or nothing, so that nobody waits while holding. The kernel drops the locks of a process that dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence

#: Cases that may share a GPU at once; four worlds at once did four times the work in 2.4 times the time.
DEVICE_SLOTS = 4

#: How often the first in the queue looks whether slots have become free.
_POLL_SECONDS = 0.002


def device_of(worker: int, *, size: int, count: int) -> list[int]:
    """The devices of a world of ``size`` ranks in xdist worker ``worker``, spread over ``count`` devices."""
    offset = worker * size % count
    return [(offset + index) % count for index in range(size)]


class Leases:
    """The locks of one user on this host.

    Args:
        directory: where the lock files are; by default one private to the user.

    Raises:
        ValueError: the directory belongs to somebody else or others may write to it.
    """

    def __init__(self, directory: pathlib.Path | None = None) -> None:
        self._directory = directory or pathlib.Path(tempfile.gettempdir(), f"shardproof-leases-{os.getuid()}")
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._directory.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
            raise ValueError(f"{self._directory} must be a directory of yours that nobody else may write to")

    @contextlib.contextmanager
    def devices(self, indices: Sequence[int], *, alone: bool) -> Iterator[None]:
        """Hold these CUDA devices, shared with other cases or ``alone``; waits as long as it takes."""
        needs = [[f"cuda-{index}.{slot}" for slot in range(DEVICE_SLOTS)] for index in sorted(set(indices))]
        takes = [(slots, len(slots) if alone else 1) for slots in needs]
        with self._hold(takes):
            yield

    @contextlib.contextmanager
    def cores(self, ranks: int, *, alone: bool) -> Iterator[None]:
        """Hold a core for each rank, all cores for a world that is larger or ``alone``."""
        cores = [f"core-{index}.0" for index in sorted(os.sched_getaffinity(0))]
        with self._hold([(cores, len(cores) if alone else min(ranks, len(cores)))]):
            yield

    @contextlib.contextmanager
    def _hold(self, takes: Sequence[tuple[Sequence[str], int]]) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            with self._locked("queue", blocking=True):
                while not self._try_all(takes, held):
                    time.sleep(_POLL_SECONDS)
            yield

    def _try_all(self, takes: Sequence[tuple[Sequence[str], int]], held: contextlib.ExitStack) -> bool:
        """Lock that many of each list's files and move them to ``held``; or none."""
        with contextlib.ExitStack() as attempt:
            for names, wanted in takes:
                for name in names:
                    if wanted and self._try(name, attempt):
                        wanted -= 1
                if wanted:
                    return False
            held.push(attempt.pop_all())
            return True

    def _try(self, name: str, attempt: contextlib.ExitStack) -> bool:
        try:
            attempt.enter_context(self._locked(name, blocking=False))
        except BlockingIOError:
            return False
        return True

    @contextlib.contextmanager
    def _locked(self, name: str, *, blocking: bool) -> Iterator[None]:
        descriptor = os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
            yield
        finally:
            os.close(descriptor)
