"""Exchanges of values between the ranks of a world on one host, through files that all of them have open.

A gloo collective of pickles takes milliseconds where ranks share cores, and a case needs several. Here each rank writes
its value to a file of its own in the world's directory, which stays in the page cache, and wakes the others through
their named pipes; a rank that waits sleeps in a read.
"""

import collections
import hashlib
import hmac
import os
import pathlib
import selectors
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Protocol

#: The number of the rank, and the length of its value in bytes. Records of up to ``PIPE_BUF`` bytes are written and
#: read as a whole, also where several ranks write to one pipe.
_NOTICE = struct.Struct("<II")


class Exchange:
    """One rank's part in the exchanges of its world; making it raises OSError without space for a named pipe."""

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
        """Gather one value, shorter than 4 GiB, from every rank, in rank order (collective); OSError without space."""
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


class Seal:
    """What two processes of a job add to each message between them, so that nobody else can add or change one.

    Args:
        key: of this connection, which only the two know.
        mine: names this side; the other one swaps the names.
        theirs: names the other side.
    """

    def __init__(self, key: bytes, *, mine: bytes, theirs: bytes) -> None:
        self._key, self._mine, self._theirs = key, mine, theirs
        self._sent = self._received = 0

    def close(self, message: bytes) -> bytes:
        """Return the message with its code."""
        self._sent += 1
        return self._code(self._mine, self._sent, message) + message

    def open(self, sealed: bytes) -> bytes:
        """Return the message; ConnectionError if it is not the next one of the other side."""
        code, message = sealed[:_CODE], sealed[_CODE:]
        self._received += 1
        if not hmac.compare_digest(code, self._code(self._theirs, self._received, message)):
            raise ConnectionError("a message is not of a process of this job")
        return message

    def _code(self, side: bytes, number: int, message: bytes) -> bytes:
        made = hashlib.blake2b(key=self._key, digest_size=_CODE)
        made.update(side + number.to_bytes(8, "little"))
        made.update(message)
        return made.digest()


#: Bytes of the code of a message.
_CODE = 32


# Exchanges of values between ranks of several hosts: through files within a host, through sockets between hosts.

_LENGTH = struct.Struct("<Q")

#: The most bytes that are written or read at a time.
_PART = 1 << 20


class Gathers(Protocol):
    """One rank's part in the exchanges of its world."""

    def gather(self, value: bytes) -> list[bytes]:
        """Gather one value from every rank (collective), in rank order."""


class HostExchange:
    """One rank's part in the exchanges of a world of several hosts.

    ``peers`` are the connections with all other ranks, by rank; non-blocking from here on. ``seals`` are theirs.
    """

    def __init__(
        self, within: Gathers, *, here: Sequence[int], peers: Mapping[int, socket.socket], seals: Mapping[int, Seal]
    ) -> None:
        self._within = within
        self._seals = seals
        self._here = here
        self._peers = peers
        for peer in peers.values():
            peer.setblocking(False)

    def gather(self, value: bytes) -> list[bytes]:
        """Gather one value from every rank, in rank order (collective); OSError if another host cannot be reached."""
        values = dict(zip(self._here, self._within.gather(value), strict=True))
        with selectors.DefaultSelector() as selector:
            transfers = []
            for rank, peer in self._peers.items():
                message = self._seals[rank].close(value)
                transfers.append(_Transfer(rank, peer, _LENGTH.pack(len(message)) + message))
            for transfer in transfers:
                selector.register(transfer.peer, selectors.EVENT_READ | selectors.EVENT_WRITE, transfer)
            while selector.get_map():
                for key, events in selector.select():
                    # Send and receive what is possible now, and wait for no more than is left.
                    if left := key.data.go_on(events):
                        selector.modify(key.fileobj, left, key.data)
                    else:
                        selector.unregister(key.fileobj)
            for one in transfers:
                values[one.rank] = self._seals[one.rank].open(bytes(one.received[_LENGTH.size :]))
        return [values[rank] for rank in sorted(values)]


class _Transfer:
    """One exchange with one other rank: a value there and a value back."""

    def __init__(self, rank: int, peer: socket.socket, message: bytes) -> None:
        self.rank = rank
        self.peer = peer
        self.unsent = memoryview(message)
        self.received = bytearray()

    @property
    def lacking(self) -> int:
        """The bytes of the other rank's message that are still to come. What follows them belongs to the next one."""
        if len(self.received) < _LENGTH.size:
            return _LENGTH.size - len(self.received)
        (length,) = _LENGTH.unpack_from(self.received)
        return int(length) + _LENGTH.size - len(self.received)

    def go_on(self, events: int) -> int:
        """Send and receive what is possible now, and return what is left; ConnectionError if the other rank ended."""
        if events & selectors.EVENT_WRITE:
            self.unsent = self.unsent[self.peer.send(self.unsent[:_PART]) :]
        if events & selectors.EVENT_READ and self.lacking:
            part = self.peer.recv(min(self.lacking, _PART))
            if not part:
                raise ConnectionError(f"Connection closed by peer: rank {self.rank} ended during an exchange")
            self.received += part
        return selectors.EVENT_WRITE * bool(self.unsent) | selectors.EVENT_READ * bool(self.lacking)
