"""The board: each rank's last announcements, in memory that the controller and all ranks of a world share.

A rank that is stuck in native code cannot answer, but the entries that it wrote before it entered that code remain
readable. The board is a file in the world's directory, which every process maps into memory. Each rank writes only to
its own part, a ring buffer of entries with a counter. It writes the entry first and the counter last, so that the
counter never includes an entry that is only partly written. A reader takes the counter before and after, and leaves out
the entries whose places the rank may have written to in between.
"""

import dataclasses
import mmap
import os
import pathlib
import struct

#: Places for announcements that the board has for each rank. The oldest is the one that is written next, so one fewer
#: can be read.
ENTRIES = 32

_COUNT = struct.Struct("<Q")
_ENTRY_BYTES = 320
_RANK_BYTES = _COUNT.size + ENTRIES * _ENTRY_BYTES
_SEPARATOR = "\x1f"


@dataclasses.dataclass(frozen=True)
class Announcement:
    """One collective that a rank was about to enter."""

    job: int  # the number of the job during which it was announced
    number: int  # the position, from 1, among this rank's collectives on ``group`` in this job
    group: str
    ranks: tuple[int, ...]  # of the group, global
    text: str

    def pack(self) -> bytes:
        """Encode the entry as ``_ENTRY_BYTES`` bytes; the end of a text that is too long is cut off.

        If the name and the ranks of the group alone are too long, that is a ValueError.
        """
        head = _SEPARATOR.join([str(self.job), str(self.number), self.group, _shorten(self.ranks), ""]).encode()
        if len(head) > _ENTRY_BYTES:
            raise ValueError(f"the group {self.group!r} has {len(self.ranks)} ranks too irregular for the board")
        return (head + self.text.encode())[:_ENTRY_BYTES].ljust(_ENTRY_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> "Announcement":
        """Decode an entry that :meth:`pack` encoded."""
        job, number, group, ranks, text = data.rstrip(b"\0").decode(errors="ignore").split(_SEPARATOR)
        return cls(int(job), int(number), group, _lengthen(ranks), text)


def _shorten(ranks: tuple[int, ...]) -> str:
    """Write ranks as runs of equal distance, "first:last:step", separated by commas."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and (len(runs[-1]) == 1 or rank - runs[-1][-1] == runs[-1][1] - runs[-1][0]) and rank != runs[-1][-1]:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}:{run[-1]}:{run[1] - run[0] if len(run) > 1 else 1}" for run in runs)


def _lengthen(text: str) -> tuple[int, ...]:
    ranks: list[int] = []
    for run in text.split(","):
        first, last, step = map(int, run.split(":"))
        ranks += range(first, last + (1 if step > 0 else -1), step)
    return tuple(ranks)


class Board:
    """The shared memory of one world of ``size`` ranks, in a file that is created if it does not exist.

    Without space for the file it raises an OSError.
    """

    def __init__(self, path: pathlib.Path, size: int) -> None:
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(size * _RANK_BYTES)
            # A hole that finds no space when it is first written to kills the writer with SIGBUS.
            os.posix_fallocate(file.fileno(), 0, size * _RANK_BYTES)
            self._memory = mmap.mmap(file.fileno(), size * _RANK_BYTES)

    def post(self, rank: int, entry: Announcement) -> None:
        """Append an entry to the ring buffer of ``rank``; only that rank may call this."""
        start = rank * _RANK_BYTES
        (count,) = _COUNT.unpack_from(self._memory, start)
        offset = start + _COUNT.size + (count % ENTRIES) * _ENTRY_BYTES
        self._memory[offset : offset + _ENTRY_BYTES] = entry.pack()
        _COUNT.pack_into(self._memory, start, count + 1)

    def entries(self, rank: int, *, job: int) -> list[Announcement]:
        """Return the last entries of ``rank`` in a job, oldest first; at most ``ENTRIES - 1``."""
        start = rank * _RANK_BYTES
        (count,) = _COUNT.unpack_from(self._memory, start)
        data = {}
        for position in range(max(0, count - ENTRIES + 1), count):
            offset = start + _COUNT.size + (position % ENTRIES) * _ENTRY_BYTES
            data[position] = self._memory[offset : offset + _ENTRY_BYTES]
        (now,) = _COUNT.unpack_from(self._memory, start)
        # The rank may be writing entry ``now``, which takes the place of entry ``now - ENTRIES``.
        entries = [Announcement.unpack(one) for position, one in data.items() if position > now - ENTRIES]
        return [entry for entry in entries if entry.job == job]

    def close(self) -> None:
        """Unmap the shared memory."""
        self._memory.close()
