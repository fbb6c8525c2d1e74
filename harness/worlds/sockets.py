"""Connections between the processes of a job of torchrun: messages over TCP, from who knows the job's key alone.

The kernel looks after each connection: it ends one whose other host has been silent for ``SILENT_SECONDS``, however
busy the processes are. Imports no torch.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

#: Seconds of silence after which a connection ends. A host that is there answers the kernel's probes at once, even if
#: all of its processes are stopped.
SILENT_SECONDS = 15

#: Seconds between two probes.
_PROBE_SECONDS = 3

#: Seconds that the other side may take to prove that it knows the key.
_PROOF_SECONDS = 10


def listener(*, everywhere: bool) -> socket.socket:
    """Listen on a free port.

    Args:
        everywhere: on all interfaces, for a job of several hosts; otherwise on the loopback interface.
    """
    if not everywhere:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def accept(listening: socket.socket, key: bytes) -> Connection | None:
    """Accept one connection; None if the other side did not prove that it knows the key.

    Raises:
        OSError: ``listening`` is closed.
    """
    raw, _ = listening.accept()
    with contextlib.suppress(OSError, EOFError, AuthenticationError, AssertionError):
        return _trusted(raw, key, accepts=True)
    return None


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Connect to a process of the job.

    Args:
        address: its host and port.
        key: the job's key.

    Raises:
        OSError: there is no connection, or the other side does not know the key.
    """
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
