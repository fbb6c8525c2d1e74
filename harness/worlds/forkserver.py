"""The preloaded process from which ranks are forked: torch imported once, no device touched."""

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

#: Read when a library loads or a group starts, so they must be there before the ranks are.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Parallel runs on one host never meet, and no rank listens where other hosts can reach it.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # cuBLAS is bitwise repeatable only with a fixed workspace.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def start() -> None:
    """Start the forkserver if it does not run yet; returns before it has imported torch."""
    context().set_forkserver_preload([entry.PRELOADED])
    with _environment():
        forkserver.ensure_running()


def context() -> ForkServerContext:
    """The multiprocessing context whose processes are ranks."""
    return multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def _environment() -> Iterator[None]:
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
