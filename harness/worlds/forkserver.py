"""The forkserver from which ranks are forked: it has imported torch once and has initialised no device."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import shardproof
from shardproof.harness.worlds import entry

#: Libraries read these variables when they load or when a process group starts, so they must be set before the ranks
#: start.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # The loopback interface: parallel runs on one host never connect to each other, and no rank listens on an address
    # that other hosts can reach.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # cuBLAS results are bitwise reproducible only with a fixed workspace.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def start() -> None:
    """Start the forkserver if it is not running; returns before it has finished importing torch."""
    context().set_forkserver_preload([entry.PRELOADED])
    with _environment():
        forkserver.ensure_running()


def context() -> ForkServerContext:
    """Return the multiprocessing context that starts rank processes."""
    return multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set the variables that the forkserver and its ranks inherit, and restore the controller's own afterwards."""
    root = str(pathlib.Path(shardproof.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    changes = {**_ENVIRONMENT, "PYTHONPATH": path}
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
