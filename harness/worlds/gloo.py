"""Groups of gloo with one worker thread each. With two, torch corrupts the memory of the process (F-270).

After each collective a worker thread writes the collective's name to a string of its group that no lock protects. If
two threads do that at once, both free the same memory, and the process dies some time later, anywhere. Names of more
than 15 characters live in memory of their own; the collectives of DTensor have such names. A thread that is alone meets
no other.

It also keeps the collectives of a group in the order in which they were issued, as NCCL does.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_Gloo: Any = dist.ProcessGroupGloo  # whose options have no type stubs

#: The network interfaces to use, separated by commas, if they are not chosen by the host's name.
_INTERFACES = "GLOO_SOCKET_IFNAME"


class _AnyGloo(type(_Gloo)):  # type: ignore[misc]
    """What torch asks ``isinstance`` about: a group whose Python object is gone comes back as one of torch's class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Gloo)


class _OneThread(_Gloo, metaclass=_AnyGloo):  # type: ignore[misc]
    """A gloo group made as torch makes it, but for the number of threads."""

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
    """Let this process make groups of gloo with one worker thread each from now on, whoever asks for them."""
    # torch takes no options for gloo: `pg_options` is ignored.
    distributed_c10d.ProcessGroupGloo = _OneThread  # type: ignore[misc]
