"""The store of a torchrun job, through which its processes find each other; imports torch when it is used."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from shardproof.harness.worlds.torchrun import Place

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

#: Time in which the controller announces itself: it reads its options first, which imports an implementation's package.
_TIMEOUT = datetime.timedelta(seconds=300)

_KEEP: list[object] = []


def announce(place: Place, port: int, key: bytes) -> None:
    """Write where the controller listens, and the job's key.

    The key keeps out what does not belong to the job by accident or from outside. Whoever can read the job's store can
    read it, as torch's own process groups can be joined by whoever can.
    """
    store = _job(place)
    store.set("key", key.hex())
    store.set("port", str(port))


def find(place: Place) -> tuple[tuple[str, int], bytes]:
    """Wait for what the controller announces; returns its address and the job's key."""
    store = _job(place)
    store.wait(["port"], _TIMEOUT)
    master = place.master if place.nodes > 1 else "127.0.0.1"
    return (master, int(store.get("port"))), bytes.fromhex(store.get("key").decode())


def of_world(master: str, port: int, prefix: str) -> Store:
    """Return the part of the job's store that belongs to one world.

    Args:
        master: the address of the store.
        port: its port.
        prefix: the prefix of the world's keys.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    return PrefixStore(prefix, TCPStore(master, port, is_master=False, timeout=_TIMEOUT))


def _job(place: Place) -> Store:
    """Join the job's store as torch itself does, which also starts it where no torchrun has."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
    # Where this process holds the store, it lives as long as the process.
    _KEEP.append(store)
    return PrefixStore(place.prefix, store)
