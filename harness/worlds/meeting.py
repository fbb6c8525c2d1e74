"""How the ranks of a world of several hosts find each other: through the store of their torchrun job."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from shardproof.harness.parity.exchange import Exchange
from shardproof.harness.parity.host_exchange import HostExchange
from shardproof.harness.worlds import sockets, store
from shardproof.harness.worlds.jobs import Meeting, RankSpec

if TYPE_CHECKING:
    from torch.distributed import Store


def store_of(meeting: Meeting) -> Store:
    """Return the world's part of the job's store."""
    return store.of_world(meeting.master, meeting.port, meeting.prefix)


def across(spec: RankSpec, within: Exchange, shared: Store) -> HostExchange:
    """Connect this rank with those of other hosts (collective).

    Of two hosts the one with the smaller number connects: the host of rank 0 may know itself by an address that only
    it can use, and the others know the addresses by which they reach it.

    Args:
        spec: which rank of which world this process is.
        within: this rank's part in the exchanges of its host.
        shared: the world's part of the job's store.

    Raises:
        OSError: another host cannot be reached.
    """
    assert spec.meeting is not None, "only ranks of several hosts meet"
    node, key = spec.nodes[spec.index], spec.meeting.key
    others = [rank for rank, other in enumerate(spec.nodes) if other != node]
    awaited = [rank for rank in others if spec.nodes[rank] < node]
    peers: dict[int, Connection] = {}
    with sockets.listener(everywhere=True) as listening:
        address = _own_address(spec.meeting)
        shared.set(f"exchange{spec.index}", f"{address} {listening.getsockname()[1]}")
        for rank in others:
            if rank not in awaited:
                host, port = shared.get(f"exchange{rank}").decode().split()
                peers[rank] = sockets.connect((host, int(port)), key)
                peers[rank].send(spec.index)
        while not set(awaited) <= set(peers):
            connection = sockets.accept(listening, key)
            if connection is not None:
                peers[connection.recv()] = connection
    here = [rank for rank, other in enumerate(spec.nodes) if other == node]
    return HostExchange(within, here=here, peers={rank: _raw(peer) for rank, peer in sorted(peers.items())})


def _own_address(meeting: Meeting) -> str:
    """Return the address from which this host reaches the job's store; other hosts reach this one there."""
    with socket.create_connection((meeting.master, meeting.port), timeout=60) as probe:
        return str(probe.getsockname()[0])


def _raw(connection: Connection) -> socket.socket:
    """Return the socket of a connection, which is closed."""
    raw = socket.socket(fileno=socket.dup(connection.fileno()))
    connection.close()
    return raw
