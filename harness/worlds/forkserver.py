"""The forkserver from which ranks are forked: it has imported torch once and has initialised no device."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess

import shardproof
from shardproof.harness.worlds import entry, scratch, waiting
from shardproof.harness.worlds.torchrun import roles
from shardproof.harness.worlds.waiting import Blockers, Process, Wait, WaitedTooLong

#: Seconds that the forkserver may take to fork a rank. The first fork waits until the forkserver has imported torch.
FORK_SECONDS = 120.0

#: Seconds for which a stopped forkserver may stay so. It is ours and serves only us: nobody needs it stopped.
STOPPED_SECONDS = 10.0

#: Seconds that the end of a killed forkserver may take.
_END_SECONDS = 5.0

_REPLACED = "the next case gets a new forkserver"

#: Libraries read these variables when they load or when a process group starts, so they must be set before the ranks
#: start.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # cuBLAS results are bitwise reproducible only with a fixed workspace.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}

#: The loopback interface: parallel runs on one host never connect to each other, and no rank listens on an address
#: that other hosts can reach. A torchrun job has interfaces of its own.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


#: Worlds of a torchrun job start in threads beside each other, and the process has one environment.
_starting = threading.Lock()


def start() -> None:
    """Start the forkserver if it is not running; returns before it has finished importing torch."""
    with _starting:
        scratch.use_for_multiprocessing()
        context().set_forkserver_preload([entry.PRELOADED])
        with _environment():
            forkserver.ensure_running()


def context() -> ForkServerContext:
    """Return the multiprocessing context that starts rank processes."""
    return multiprocessing.get_context("forkserver")


class ForkserverEnded(Exception):
    """The forkserver ended while it started a rank; the message is one line."""


def spawn(process: ForkServerProcess, what: str) -> None:
    """Start a process, and replace a forkserver that does not.

    Raises:
        WaitedTooLong: the forkserver did not answer in time. It has been killed, and the next process gets a new one.
        ForkserverEnded: the forkserver ended.
    """
    wait = Wait(
        f"the forkserver to start {what}",
        bound=FORK_SECONDS,
        stopped_bound=STOPPED_SECONDS,
        blockers=_blockers,
        advice=_REPLACED,
        stopped_advice=_REPLACED,
    )
    asked = _pid()
    try:
        waiting.in_thread(process.start, wait, discard=lambda _: process.kill())
    except WaitedTooLong:
        kill()
        raise
    except (EOFError, OSError) as error:
        raise ForkserverEnded(
            f"the forkserver (pid {asked}) ended while it started {what} ({type(error).__name__}); {_REPLACED}"
        ) from None


def has_ended(within: float = 0.0) -> bool:
    """Whether the forkserver has ended; the ranks that it forked end with it."""
    until = time.monotonic() + within
    while True:
        process = _look()
        if process is None or process.has_ended:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.01)


def is_stopped() -> bool:
    """Whether the forkserver is stopped; it then starts no rank and reports the end of none."""
    process = _look()
    return process is not None and process.is_stopped


def kill_if_stopped() -> bool:
    """Kill the forkserver if it is stopped; return whether it was."""
    if not is_stopped():
        return False
    kill()
    return True


def kill() -> None:
    """Kill the forkserver, and with it the ranks that it forked; :func:`start` starts a new one."""
    pid = _pid()
    if pid is not None and not has_ended():
        os.kill(pid, signal.SIGKILL)
        has_ended(within=_END_SECONDS)


def _pid() -> int | None:
    pid: int | None = vars(forkserver._forkserver)["_forkserver_pid"]
    return pid


def _look() -> Process | None:
    pid = _pid()
    return None if pid is None else waiting.look_at(pid)


def _blockers() -> Blockers:
    process = _look()
    return Blockers() if process is None else Blockers((process,), need_sigcont=process.is_stopped)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set the variables that the forkserver and its ranks inherit, and restore the controller's own afterwards."""
    root = str(pathlib.Path(shardproof.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    interfaces = _LOOPBACK if roles.place() is None else {}
    changes = {**_ENVIRONMENT, **interfaces, "PYTHONPATH": path}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
