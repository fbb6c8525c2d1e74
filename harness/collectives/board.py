"""What each rank last announced, in memory that all ranks of a world and the controller share.

A rank that is stuck in native code cannot answer, but what it wrote before it went in is there.
The board is a file in the world's directory, mapped by everyone. Each rank writes its own part
only: a ring of entries, and last a counter, so that a reader never sees half an entry counted.
"""

from __future__ import annotations

import dataclasses
import mmap
import pathlib
import struct

#: Collectives kept per rank.
ENTRIES = 32

_COUNT = struct.Struct("<Q")
_ENTRY_BYTES = 320
_RANK_BYTES = _COUNT.size + ENTRIES * _ENTRY_BYTES
_SEPARATOR = "\x1f"


@dataclasses.dataclass(frozen=True)
class Announcement:
    """One collective that a rank entered.

    ``number`` counts the collectives of that rank on ``group``, a process group's name, in one
    case; ``ranks`` are the group's global ranks.
    """

    job: int
    number: int
    group: str
    ranks: tuple[int, ...]
    text: str

    def pack(self) -> bytes:
        """The entry as bytes; a text that is too long loses its end."""
        fields = [str(self.job), str(self.number), self.group, ",".join(map(str, self.ranks)), self.text]
        return _SEPARATOR.join(fields).encode()[:_ENTRY_BYTES].ljust(_ENTRY_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Announcement:
        """The entry that :meth:`pack` wrote."""
        job, number, group, ranks, text = data.rstrip(b"\0").decode(errors="ignore").split(_SEPARATOR)
        return cls(int(job), int(number), group, tuple(map(int, ranks.split(","))), text)


class Board:
    """The shared memory of one world of ``size`` ranks, in the file ``path``."""

    def __init__(self, path: pathlib.Path, size: int) -> None:
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(size * _RANK_BYTES)
            self._memory = mmap.mmap(file.fileno(), size * _RANK_BYTES)

    def post(self, rank: int, entry: Announcement) -> None:
        """Append to the rank's ring; called by that rank only."""
        start = rank * _RANK_BYTES
        (count,) = _COUNT.unpack_from(self._memory, start)
        offset = start + _COUNT.size + (count % ENTRIES) * _ENTRY_BYTES
        self._memory[offset : offset + _ENTRY_BYTES] = entry.pack()
        _COUNT.pack_into(self._memory, start, count + 1)

    def entries(self, rank: int, *, job: int) -> list[Announcement]:
        """The rank's last entries of that job, oldest first."""
        start = rank * _RANK_BYTES
        (count,) = _COUNT.unpack_from(self._memory, start)
        found = []
        for position in range(max(0, count - ENTRIES), count):
            offset = start + _COUNT.size + (position % ENTRIES) * _ENTRY_BYTES
            entry = Announcement.unpack(self._memory[offset : offset + _ENTRY_BYTES])
            if entry.job == job:
                found.append(entry)
        return found

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()
