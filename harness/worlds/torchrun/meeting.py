"""The processes of a torchrun job: the place of each, how they find each other, and their authenticated messages.

Imports no torch at module level.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
import struct
import time
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING

from shardproof.harness.parity.exchange import Exchange, HostExchange
from shardproof.harness.worlds import waiting
from shardproof.harness.worlds.jobs import Meeting, RankSpec

if TYPE_CHECKING:
    from torch.distributed import Store

# The place of a process in its job, from the variables that torch elastic sets.

#: Set by torch elastic in the processes that it starts, and by nothing else.
_MARKS = ("TORCHELASTIC_RUN_ID", "RANK")

#: Variables of the job that would make libraries in a rank process believe that torchrun started it: its place in the
#: world of its case is another one.
_FOREIGN = "TORCHELASTIC_"


@dataclasses.dataclass(frozen=True)
class Place:
    """One process of a job."""

    rank: int  # the number of the process in the job; 0 is the controller
    size: int
    local_rank: int  # the number of the process on its host, and of its device
    node: int  # the number of the process's host, from 0: of its torchrun
    nodes: int
    master: str  # the address of the host of rank 0
    port: int  # the port of the job's store there
    run_id: str  # the id of the job, as ``--rdzv-id``
    attempt: int  # how often torchrun has restarted the processes
    most_attempts: int  # how often it may, as ``--max-restarts``
    host: str
    local_size: int  # the number of processes of the job on this host
    agent: str  # identifies the process of torchrun on this host, which outlives those that it restarts

    @property
    def is_controller(self) -> bool:
        """Whether this process collects, decides and reports."""
        return self.rank == 0

    @property
    def may_restart(self) -> bool:
        """Whether torchrun starts the processes again if one of them fails."""
        return self.attempt < self.most_attempts


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place of this process, or None if torchrun did not start it."""
    if not all(name in environment for name in _MARKS):
        return None
    return Place(
        rank=int(environment["RANK"]), size=int(environment["WORLD_SIZE"]), local_rank=int(environment["LOCAL_RANK"]),
        node=int(environment["GROUP_RANK"]), nodes=int(environment["GROUP_WORLD_SIZE"]),
        master=environment["MASTER_ADDR"], port=int(environment["MASTER_PORT"]),
        run_id=environment["TORCHELASTIC_RUN_ID"], attempt=int(environment["TORCHELASTIC_RESTART_COUNT"]),
        most_attempts=int(environment["TORCHELASTIC_MAX_RESTARTS"]), host=socket.gethostname(),
        local_size=int(environment["LOCAL_WORLD_SIZE"]), agent=_identity(os.getppid()),
    )  # fmt: skip


def _identity(pid: int) -> str:
    process = waiting.look_at(pid)
    return "" if process is None else f"{pid} {process.started}"


def foreign(environment: Mapping[str, str]) -> list[str]:
    """Return the variables of a job that a rank process must not have."""
    return [name for name in environment if name.startswith(_FOREIGN)]


# Connections between the processes of a job of torchrun: messages over TCP, from who knows the job's key alone.
#
# The kernel looks after each connection: it ends one whose other host has been silent for ``SILENT_SECONDS``, however
# busy the processes are.

#: Seconds of silence after which a connection ends. A host that is there answers the kernel's probes at once, even if
#: all of its processes are stopped.
SILENT_SECONDS = 15

#: Seconds between two probes.
_PROBE_SECONDS = 3

#: Seconds that the other side may take to prove that it knows the key.
_PROOF_SECONDS = 10


def listener(*, everywhere: bool) -> socket.socket:
    """Listen on a free port: of all interfaces for a job of several hosts, otherwise of the loopback interface."""
    if not everywhere:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def accept(listening: socket.socket, key: bytes) -> Connection | None:
    """Accept one connection, or None if the other side did not prove its key; OSError once ``listening`` is closed."""
    raw, _ = listening.accept()
    with contextlib.suppress(OSError, EOFError, AuthenticationError, AssertionError):
        return _trusted(raw, key, accepts=True)
    return None


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Connect to a process of the job; OSError if there is no connection, or the other side does not know the key."""
    raw = socket.create_connection(address, timeout=_PROOF_SECONDS)
    try:
        return _trusted(raw, key, accepts=False)
    except (EOFError, AuthenticationError, AssertionError):
        raise ConnectionError(f"{address[0]}:{address[1]} is no process of this job") from None


def _trusted(raw: socket.socket, key: bytes, *, accepts: bool) -> Connection:
    """Let both sides prove that they know the key, and return the connection."""
    watch(raw)
    raw.settimeout(None)
    # Also for what the other side never sends: a thread must not wait for a stranger.
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _PROOF_SECONDS, 0))
    option = socket.fromfd(raw.fileno(), raw.family, raw.type)
    connection: Connection = Connection(raw.detach())
    try:
        steps = [deliver_challenge, answer_challenge]
        for step in steps if accepts else reversed(steps):
            step(connection, key)
        option.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    except BaseException:
        connection.close()
        raise
    finally:
        option.close()
    return connection


def watch(raw: socket.socket) -> None:
    """Let the kernel end a connection whose other host is silent, and send what is written at once."""
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_SECONDS // _PROBE_SECONDS)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)


# The store of a torchrun job, through which its processes find each other; imports torch when it is used.

#: Time in which the controller announces itself: it reads its options first, which imports an implementation's package.
_TIMEOUT = datetime.timedelta(seconds=300)

_CONTROLLER = "controller"
_POLL_SECONDS = 0.2

_KEEP: list[object] = []


def announce(place: Place, port: int, key: bytes) -> None:
    """Write where the controller listens, and the job's key.

    The key keeps out what does not belong to the job by accident or from outside. Whoever can read the job's store can
    read it, as torch's own process groups can be joined by whoever can.
    """
    _job(place).set(_CONTROLLER, f"{port} {key.hex()}")


def join(place: Place) -> tuple[tuple[str, int], bytes, Connection]:
    """Wait for the controller's address and the job's key, and connect with it; OSError if there is no controller.

    Where the job's store outlives a restart, as with a static rendezvous, what the last controller announced is there
    until this one does.
    """
    store = _job(place)
    store.wait([_CONTROLLER], _TIMEOUT)
    master = place.master if place.nodes > 1 else "127.0.0.1"
    until = time.monotonic() + _TIMEOUT.total_seconds()
    while True:
        port, key = store.get(_CONTROLLER).decode().split()
        address = (master, int(port))
        try:
            return address, bytes.fromhex(key), connect(address, bytes.fromhex(key))
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(_POLL_SECONDS)


def _job(place: Place) -> Store:
    """Join the job's store as torch itself does, which also starts it where no torchrun has."""
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
    # Where this process holds the store, it lives as long as the process.
    _KEEP.append(store)
    return PrefixStore(f"shardproof/{place.run_id}", store)


def store_of(meeting: Meeting) -> Store:
    """Return the world's part of the job's store."""
    from torch.distributed import PrefixStore, TCPStore

    return PrefixStore(meeting.prefix, TCPStore(meeting.master, meeting.port, is_master=False, timeout=_TIMEOUT))


def across(spec: RankSpec, within: Exchange, shared: Store) -> HostExchange:
    """Connect this rank with those of other hosts (collective); OSError if another host cannot be reached.

    Of two hosts the one with the smaller number connects: the host of rank 0 may know itself by an address that only
    it can use, and the others know the addresses by which they reach it.
    """
    assert spec.meeting is not None, "only ranks of several hosts meet"
    node, key = spec.nodes[spec.index], spec.meeting.key
    others = [rank for rank, other in enumerate(spec.nodes) if other != node]
    awaited = [rank for rank in others if spec.nodes[rank] < node]
    peers: dict[int, Connection] = {}
    with listener(everywhere=True) as listening:
        # The address from which this host reaches the job's store is the one by which others reach this host.
        with socket.create_connection((spec.meeting.master, spec.meeting.port), timeout=60) as probe:
            address = probe.getsockname()[0]
        shared.set(f"exchange{spec.index}", f"{address} {listening.getsockname()[1]}")
        for rank in others:
            if rank not in awaited:
                host, port = shared.get(f"exchange{rank}").decode().split()
                peers[rank] = connect((host, int(port)), key)
                peers[rank].send(spec.index)
        while not set(awaited) <= set(peers):
            connection = accept(listening, key)
            if connection is not None:
                peers[connection.recv()] = connection
    here = [rank for rank, other in enumerate(spec.nodes) if other == node]
    return HostExchange(within, here=here, peers={rank: _raw(peer) for rank, peer in sorted(peers.items())})


def _raw(connection: Connection) -> socket.socket:
    """Return the socket of a connection, which is closed."""
    raw = socket.socket(fileno=socket.dup(connection.fileno()))
    connection.close()
    return raw
