"""Gloo groups with one worker thread each, whose threads do not interrupt others.

With two worker threads, torch corrupts the process's memory (F-270): after each collective a worker stores the
collective's name in a string of the group that no lock protects. If two threads do that at the same time, both free the
same memory, and the process crashes later, at an unrelated place. Names of more than 15 characters are allocated on the
heap; the collectives of DTensor have such names. One thread cannot race with itself. It also runs a group's collectives
in the order in which they were issued, as NCCL does.

With the usual policy of the scheduler, gloo wastes the cores that its ranks share (F-271): a worker locks a connection
while it sends. That wakes the thread of the other process that polls for messages, which interrupts whoever runs on its
core, often a worker that holds such a lock. The polling thread of the interrupted worker's own process cannot take the
lock when a message comes, and so it polls again and again, without a pause, until the worker has got a core.
"""

import contextlib
import datetime
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from shardproof.harness.tensors import private

_GLOO = "torch.distributed.distributed_c10d.ProcessGroupGloo"

_Gloo: Any = private.take(_GLOO)  # whose options have no type stubs


@contextlib.contextmanager
def _threads_that_do_not_preempt() -> Iterator[None]:
    """Threads that start in here have the policy ``SCHED_BATCH``, if the system has it and permits it.

    A thread with that policy has the same share of the cores, but does not interrupt others when it wakes. Of a process
    with another policy than the usual one, threads keep that: whoever chose it knows why, and a process may give up a
    real-time policy that it may not take back.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    try:
        # A thread inherits the policy of the thread that starts it. Set afterwards, it would need the threads' numbers,
        # which torch does not tell.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class _AnyGloo(type(_Gloo)):  # type: ignore[misc]
    """Lets ``isinstance`` accept any gloo group: one whose Python object was freed comes back as torch's own class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Gloo)


class _Mended(_Gloo, metaclass=_AnyGloo):  # type: ignore[misc]
    """A gloo group made as torch makes it, except for the number of threads and their policy.

    Where torch's class does not take what that needs, it is torch's own group.
    """

    def __init__(self, store: Any, rank: int, size: int, *given: Any, **named: Any) -> None:
        with _threads_that_do_not_preempt():  # devices start threads too
            try:
                super().__init__(store, rank, size, _options(*given, **named))
            except (AttributeError, TypeError) as error:
                _warn_once(str(error))
                super().__init__(store, rank, size, *given, **named)


def _options(timeout: datetime.timedelta = dist.default_pg_timeout, **more: Any) -> Any:
    """The options of a mended group; AttributeError or TypeError where torch lacks one or makes groups from others."""
    options = _Gloo._Options()
    for name in ("_timeout", "_threads", "_devices", *more):
        getattr(options, name)  # of a class in Python, any could be set
    options._timeout = timeout
    options._threads = 1
    for name, value in more.items():  # since torch 2.14 `enable_reconfigure`, which is an option too
        setattr(options, name, value)
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")  # without it gloo takes that of the host's name
    options._devices = (
        [_Gloo.create_device(interface=name) for name in interfaces.split(",")]
        if interfaces
        else [_Gloo.create_default_device()]
    )
    return options


@functools.cache
def _warn_once(why: str) -> None:
    warnings.warn(f"gloo groups are torch's own, which may crash (F-270) or be slow (F-271): {why}", stacklevel=2)


def mend_groups() -> None:
    """Give every gloo group that ``torch.distributed`` makes in this process from now on one worker thread.

    The threads of these groups do not interrupt others. Where torch lacks a name that this needs, nothing changes.
    """
    if "gloo" not in private.mends():
        # torch takes no options for gloo: `pg_options` is ignored.
        private.put(_GLOO, _Mended)
