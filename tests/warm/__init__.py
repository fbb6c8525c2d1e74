"""A warm Python: an executable that acts as ``sys.executable`` and has imported torch and pytest when it starts.

A fresh interpreter spends two to four seconds of a core on these imports, and a run of pytest with ranks pays for them
once more in its forkserver. Here a server imports them once for all the tests of a run, and each command is a fork of
it. The server has imported nothing of this project and has run no test, so that the fork is what a fresh interpreter is
after these imports.

- ``server``: the process that is forked; ``program``: what a fork does to become the command.
- ``launcher``: the executable. It hands over its arguments, environment and files, passes signals on, and ends as the
  command ends.

Tests about what imports torch, and one of each kind about the end of a process, use ``sys.executable``.
"""

from __future__ import annotations

import fcntl
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable

FOLDER = "SHARDPROOF_TESTS_WARM"
"""The variable with the folder of this run's server, for xdist's workers."""

_HERE = pathlib.Path(__file__).parent


def make_folder() -> Callable[[], None]:
    """Make the folder of the server of a run, which is started on first use; returns what removes it.

    The workers of xdist inherit the variable that names it, and use their controller's.
    """
    if FOLDER in os.environ:
        return lambda: None
    # A short path, because it is a socket's.
    made = pathlib.Path(tempfile.mkdtemp(prefix="warm-", dir="/tmp"))
    (made / "owner").write_text(str(os.getpid()))
    os.environ[FOLDER] = str(made)

    def remove() -> None:
        del os.environ[FOLDER]
        shutil.rmtree(made, ignore_errors=True)

    return remove


@functools.cache
def python() -> str:
    """Return the path of the executable; its server has been started."""
    directory = pathlib.Path(os.environ[FOLDER])
    executable = directory / "python"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not executable.exists():
            _start_server(directory)
            text = (_HERE / "launcher.py").read_text()
            made = directory / "python.new"
            made.write_text(f"#!{sys.executable} -ISu\n{text}")
            made.chmod(0o700)
            made.rename(executable)
    return str(executable)


def _start_server(directory: pathlib.Path) -> None:
    """Start the server and wait until it listens."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(_HERE / "server.py"), str(directory)]
    log = (directory / "server.log").open("w")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": log}
    server = subprocess.Popen(command, env=environment, cwd="/", start_new_session=True, text=True, **pipes)
    with log:
        assert server.stdout is not None
        line = server.stdout.readline()
    assert line == "ready\n", (directory / "server.log").read_text()
