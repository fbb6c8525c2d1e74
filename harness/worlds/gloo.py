"""Gloo groups with one worker thread each. With two, torch corrupts the process's memory (F-270).

After each collective a worker thread stores the collective's name in a string of the group that no lock protects. If
two threads do that at the same time, both free the same memory, and the process crashes later, at an unrelated place.
Names of more than 15 characters are allocated on the heap; the collectives of DTensor have such names. One thread
cannot race with itself.

One thread also runs a group's collectives in the order in which they were issued, as NCCL does.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_Gloo: Any = dist.ProcessGroupGloo  # whose options have no type stubs

#: The environment variable with network interfaces, separated by commas. Without it gloo takes that of the host's name.
_INTERFACES = "GLOO_SOCKET_IFNAME"


class _AnyGloo(type(_Gloo)):  # type: ignore[misc]
    """Lets ``isinstance`` accept any gloo group: one whose Python object was freed comes back as torch's own class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Gloo)


class _OneThread(_Gloo, metaclass=_AnyGloo):  # type: ignore[misc]
    """A gloo group made as torch makes it, except for the number of threads."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: datetime.timedelta = distributed_c10d.default_pg_timeout,
    ) -> None:
        options = _Gloo._Options()
        interfaces = os.environ.get(_INTERFACES, "")
        options._devices = (
            [_Gloo.create_device(interface=name) for name in interfaces.split(",")]
            if interfaces
            else [_Gloo.create_default_device()]
        )
        options._timeout = timeout
        options._threads = 1
        super().__init__(store, rank, size, options)


def use_one_thread() -> None:
    """Give every gloo group that ``torch.distributed`` makes in this process from now on one worker thread."""
    # torch takes no options for gloo: `pg_options` is ignored.
    distributed_c10d.ProcessGroupGloo = _OneThread  # type: ignore[misc]
