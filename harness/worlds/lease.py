"""Leases on the devices and cores that the pytest processes of a host share, such as xdist's workers.

A process runs a case only while it holds a lease on the devices of the case's world. Each device has a fixed number of
slots, and each slot is a lock file. A correctness case takes one slot of each of its devices; a case that measures
takes all of them. Processes queue for the right to take slots. The process at the head of the queue takes either all
the slots that it needs or none, so no process holds some slots while it waits for others. The kernel releases the locks
of a process that dies.
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

#: Cases that may use one GPU at the same time. Measured: four concurrent worlds did four times the work in 2.4 times
#: the time.
DEVICE_SLOTS = 4

#: Seconds between the attempts of the process at the head of the queue to take its slots.
_POLL_SECONDS = 0.002


def device_of(worker: int, *, size: int, count: int) -> list[int]:
    """Assign CUDA devices to the ranks of a world, so that the worlds of different workers start on different devices.

    Args:
        worker: the index of this process among xdist's workers.
        size: the number of ranks of the world.
        count: the number of CUDA devices of the host; at least 1.

    Returns:
        The device index of each rank; ranks share devices where ``size`` exceeds ``count``.
    """
    offset = worker * size % count
    return [(offset + index) % count for index in range(size)]


class Leases:
    """The device and core locks of one user on this host.

    Args:
        directory: where the lock files are; by default a directory private to the user.

    Raises:
        ValueError: another user owns the directory, other users may write to it, or it is not a directory.
    """

    def __init__(self, directory: pathlib.Path | None = None) -> None:
        self._directory = directory or pathlib.Path(tempfile.gettempdir(), f"shardproof-leases-{os.getuid()}")
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self._directory.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
            raise ValueError(f"{self._directory} must be a directory that you own and that nobody else may write to")

    @contextlib.contextmanager
    def devices(self, indices: Sequence[int], *, alone: bool) -> Iterator[None]:
        """Hold a lease on CUDA devices; waits without a time limit.

        Args:
            indices: the devices; duplicates count once.
            alone: take all slots of each device, so that no other case uses it, instead of one slot of each.
        """
        needs = [[f"cuda-{index}.{slot}" for slot in range(DEVICE_SLOTS)] for index in sorted(set(indices))]
        takes = [(slots, len(slots) if alone else 1) for slots in needs]
        with self._hold(takes):
            yield

    @contextlib.contextmanager
    def cores(self, ranks: int, *, alone: bool) -> Iterator[None]:
        """Hold a lease on one CPU core for each rank; waits without a time limit.

        Args:
            ranks: the number of ranks; a world with more ranks than cores takes all cores.
            alone: take all cores, so that no other case runs.
        """
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
        """Lock the requested number of files of each list, or none of them.

        Args:
            takes: pairs of lock file names and how many of them to lock.
            held: receives the locks if all of them were taken.

        Returns:
            Whether the locks were taken.
        """
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
