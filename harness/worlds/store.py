"""The store of a torchrun job, through which its processes find each other; imports torch when it is used."""

from __future__ import annotations

import datetime
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from shardproof.harness.worlds.torchrun.roles.roles import Place

from shardproof.harness.worlds import sockets

if TYPE_CHECKING:
    from torch.distributed import Store

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
    """Wait for what the controller announces, and connect with it.

    Where the job's store outlives a restart, as with a static rendezvous, what the last controller announced is there
    until this one does.

    Returns:
        The controller's address, the job's key, and the connection.

    Raises:
        OSError: there is no controller.
    """
    store = _job(place)
    store.wait([_CONTROLLER], _TIMEOUT)
    master = place.master if place.nodes > 1 else "127.0.0.1"
    until = time.monotonic() + _TIMEOUT.total_seconds()
    while True:
        port, key = store.get(_CONTROLLER).decode().split()
        address = (master, int(port))
        try:
            return address, bytes.fromhex(key), sockets.connect(address, bytes.fromhex(key))
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(_POLL_SECONDS)


def of_world(master: str, port: int, prefix: str) -> Store:
    """Return the part of the job's store that belongs to one world.

    Args:
        master: the address of the store.
        port: its port.
        prefix: the prefix of the world's keys.
    """
    from torch.distributed import PrefixStore, TCPStore

    return PrefixStore(prefix, TCPStore(master, port, is_master=False, timeout=_TIMEOUT))


def _job(place: Place) -> Store:
    """Join the job's store as torch itself does, which also starts it where no torchrun has."""
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
    # Where this process holds the store, it lives as long as the process.
    _KEEP.append(store)
    return PrefixStore(f"shardproof/{place.run_id}", store)
