"""The first function of a rank process, and how a rank that needs an interpreter of its own gets one.

Does not import torch at module level, so that the controller can refer to the function without importing torch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import os
import pathlib
import pickle
import signal
import subprocess
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from shardproof.harness.worlds.jobs import RankSpec

#: The module that the forkserver imports once, so that starting a rank costs about a fork.
PRELOADED = "shardproof.harness.worlds.preloaded"

_PR_SET_PDEATHSIG = 1

#: Options of the interpreter with which it would not read its hash seed from the environment.
_DEAF = ("-E", "-I")


def main(connection: Connection, spec: RankSpec) -> None:
    """Run this process as a rank until its connection closes."""
    _leave_with_the_controller()
    if spec.hash_seed is not None:
        _start_anew(connection, spec)
    _run(connection, spec)


def _run(connection: Connection, spec: RankSpec) -> None:
    from shardproof.harness.worlds import loop

    loop.main(connection, spec)


def _leave_with_the_controller() -> None:
    # The controller decides how to react to an interrupt.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The forkserver must exit when the controller does, and its children when the forkserver does. But it runs as long
    # as any process holds the other end of its "alive" pipe, and multiprocessing passes a copy of that end to every
    # child.
    os.close(vars(forkserver._forkserver)["_forkserver_alive_fd"])
    # Lead a new session, so that the processes that the rank starts can be killed with it.
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _start_anew(connection: Connection, spec: RankSpec) -> None:
    """Replace this process's program by a new interpreter, which hashes with the seed of the spec.

    An interpreter reads its seed when it starts. The process stays the same: its id, its parent, its session, the
    signal that it ignores and that which it gets when the forkserver ends.
    """
    folder = pathlib.Path(spec.directory)
    left = folder / f"rank{spec.index}.start"
    left.write_bytes(pickle.dumps((connection.fileno(), dataclasses.replace(spec, search_path=tuple(sys.path)))))
    os.set_inheritable(connection.fileno(), True)
    # What the interpreter and the imports print belongs to the rank.
    with (folder / f"rank{spec.index}.out").open("ab") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    options = [option for option in subprocess._args_from_interpreter_flags() if option not in _DEAF]  # type: ignore[attr-defined]
    command = f"from {__name__} import go_on; go_on({str(left)!r})"
    environment = {**os.environ, "PYTHONHASHSEED": str(spec.hash_seed)}
    os.execve(sys.executable, [sys.executable, *options, "-c", command], environment)


def go_on(left: str) -> None:
    """Go on as the rank that :func:`main` began to be, in the interpreter that took its place.

    Args:
        left: the file in which it left its connection and its spec.
    """
    path = pathlib.Path(left)
    number, spec = pickle.loads(path.read_bytes())
    path.unlink()
    # What other ranks have from the forkserver.
    importlib.import_module(PRELOADED)
    _run(Connection(number), spec)
