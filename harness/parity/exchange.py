"""Exchanges of values between the ranks of a world on one host, through files that all of them have open.

A gloo collective of pickles takes milliseconds where ranks share cores, and a case needs several. Here each rank writes
its value to a file of its own in the world's directory, which stays in the page cache, and wakes the others through
their named pipes; a rank that waits sleeps in a read.
"""

from __future__ import annotations

import collections
import os
import pathlib
import struct

#: The number of the rank, and the length of its value in bytes. Records of up to ``PIPE_BUF`` bytes are written and
#: read as a whole, also where several ranks write to one pipe.
_NOTICE = struct.Struct("<II")


class Exchange:
    """One rank's part in the exchanges of its world.

    Args:
        directory: the world's directory.
        index: the rank.
        size: the number of ranks.

    Raises:
        OSError: there is no space for a named pipe.
    """

    def __init__(self, directory: pathlib.Path, *, index: int, size: int) -> None:
        self._directory = directory
        self._index = index
        self._size = size
        os.mkfifo(directory / f"notices{index}", 0o600)
        self._notices = self._open("notices", index)
        self._mine = [self._open(f"value{turn}.", index) for turn in range(2)]
        self._pipes: dict[int, int] = {}
        self._files: list[dict[int, int]] = [{}, {}]
        self._lengths: dict[int, collections.deque[int]] = {
            other: collections.deque() for other in range(size) if other != index
        }
        self._turn = 0

    def connect(self) -> None:
        """Open the files of the other ranks, all of which must have made their ``Exchange``."""
        for other in self._lengths:
            self._pipes[other] = self._open("notices", other)
            for turn, files in enumerate(self._files):
                files[other] = self._open(f"value{turn}.", other)

    def gather(self, value: bytes) -> list[bytes]:
        """Gather one value from every rank (collective).

        Args:
            value: this rank's value, shorter than 4 GiB.

        Returns:
            One value per rank, in rank order.

        Raises:
            OSError: there is no space for the value.
        """
        # Two files suffice: a rank writes to the first one again after it has every other's second value, and those
        # were written after their ranks had read all first values.
        turn, self._turn = self._turn, 1 - self._turn
        _write(self._mine[turn], value)
        notice = _NOTICE.pack(self._index, len(value))
        for pipe in self._pipes.values():
            os.write(pipe, notice)
        while not all(self._lengths.values()):
            other, length = _NOTICE.unpack(os.read(self._notices, _NOTICE.size))
            self._lengths[other].append(length)
        return [
            value if rank == self._index else _read(self._files[turn][rank], self._lengths[rank].popleft())
            for rank in range(self._size)
        ]

    def _open(self, name: str, rank: int) -> int:
        # For reading and writing: a pipe opened so waits for no other process.
        return os.open(self._directory / f"{name}{rank}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _write(file: int, value: bytes) -> None:
    done = 0
    while done < len(value):
        done += os.pwrite(file, value[done:], done)


def _read(file: int, length: int) -> bytes:
    parts, done = [], 0
    while done < length:
        parts.append(os.pread(file, length - done, done))
        done += len(parts[-1])
    return b"".join(parts)
