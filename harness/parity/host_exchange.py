"""Exchanges of values between ranks of several hosts: through files within a host, through sockets between hosts."""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Protocol

_LENGTH = struct.Struct("<Q")

#: The most bytes that are written or read at a time.
_PART = 1 << 20


class Gathers(Protocol):
    """One rank's part in the exchanges of its world."""

    def gather(self, value: bytes) -> list[bytes]:
        """Gather one value from every rank (collective), in rank order."""


class HostExchange:
    """One rank's part in the exchanges of a world of several hosts.

    Args:
        within: the exchanges with the ranks of this host.
        here: the ranks of this host, in order.
        peers: the connections with all other ranks, by rank; non-blocking from here on.
    """

    def __init__(self, within: Gathers, *, here: Sequence[int], peers: Mapping[int, socket.socket]) -> None:
        self._within = within
        self._here = here
        self._peers = peers
        for peer in peers.values():
            peer.setblocking(False)

    def gather(self, value: bytes) -> list[bytes]:
        """Gather one value from every rank (collective).

        Args:
            value: this rank's value.

        Returns:
            One value per rank, in rank order.

        Raises:
            OSError: there is no space for the value, or another host cannot be reached.
        """
        values = dict(zip(self._here, self._within.gather(value), strict=True))
        message = _LENGTH.pack(len(value)) + value
        with selectors.DefaultSelector() as selector:
            transfers = [_Transfer(rank, peer, message) for rank, peer in self._peers.items()]
            for transfer in transfers:
                selector.register(transfer.peer, selectors.EVENT_READ | selectors.EVENT_WRITE, transfer)
            while selector.get_map():
                for key, events in selector.select():
                    _go_on(selector, key.data, events)
            values |= {transfer.rank: bytes(transfer.received[_LENGTH.size :]) for transfer in transfers}
        return [values[rank] for rank in sorted(values)]


def _go_on(selector: selectors.BaseSelector, transfer: _Transfer, events: int) -> None:
    """Send and receive what is possible now, and wait for no more than is left."""
    if events & selectors.EVENT_WRITE:
        transfer.send()
    if events & selectors.EVENT_READ:
        transfer.receive()
    left = selectors.EVENT_WRITE * bool(transfer.unsent) | selectors.EVENT_READ * bool(transfer.lacking)
    if left:
        selector.modify(transfer.peer, left, transfer)
    else:
        selector.unregister(transfer.peer)


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

    def send(self) -> None:
        """Send as much as the connection takes now."""
        self.unsent = self.unsent[self.peer.send(self.unsent[:_PART]) :]

    def receive(self) -> None:
        """Receive what is there; it may be less than a message.

        Raises:
            ConnectionError: the other rank ended.
        """
        if not self.lacking:  # only what this rank has to send is left
            return
        part = self.peer.recv(min(self.lacking, _PART))
        if not part:
            raise ConnectionError(f"Connection closed by peer: rank {self.rank} ended during an exchange")
        self.received += part
