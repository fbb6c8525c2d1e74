"""What a fork of the server does to become a command."""

from __future__ import annotations

import array
import atexit
import contextlib
import dataclasses
import fcntl
import importlib
import json
import os
import runpy
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Iterable, Sequence
from multiprocessing import util
from typing import Any, NoReturn

#: Descriptors from here on are free while those below are replaced.
_FREE = 512

_MAIN = sys.modules["__main__"]
_PATH = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
_SPAWN = util.spawnv_passfds
_FORKSERVER = "from multiprocessing.forkserver import main"


@dataclasses.dataclass
class Request:
    """A command.

    Attributes:
        argv: the executable and its arguments.
        cwd: its working directory.
        environment: its variables.
        files: the descriptors here of its files, by their numbers there.
    """

    argv: list[str]
    cwd: str
    environment: dict[str, str]
    files: dict[int, int]


def send(connection: socket.socket, *, argv: Sequence[str], files: dict[int, int]) -> None:
    """Send a request with the environment of this process."""
    content = {"argv": list(argv), "cwd": os.getcwd(), "environment": dict(os.environ), "files": list(files)}
    text = json.dumps(content).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files.values()))]
    connection.sendmsg([len(text).to_bytes(4, "little")], rights)
    connection.sendall(text)


def receive(connection: socket.socket) -> Request | None:
    """Wait for a request; None if the other side has ended."""
    head, received, _, _ = socket.recv_fds(connection, 4, 253)
    size = int.from_bytes(head, "little")
    text = b""
    while head and len(text) < size:
        if not (part := connection.recv(size - len(text))):
            break
        text += part
    if not head or len(text) < size:
        for number in received:
            os.close(number)
        return None
    content = json.loads(text)
    return Request(**content | {"files": dict(zip(content["files"], received, strict=True))})


def become(request: Request, *, reserve: bool = True) -> None:
    """Give this process the files, the environment and the arguments of a command.

    Args:
        request: the command.
        reserve: keep a fork of this process for the forkserver that the command may start.
    """
    _take_files(request.files)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environment)
    _open_streams(request.files)
    sys.argv = list(request.argv)
    sys.executable = os.path.abspath(sys.argv[0])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX") or None
    sys.path[:] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path] + _PATH
    tempfile.tempdir = None
    importlib.invalidate_caches()
    util.spawnv_passfds = _Reserve().spawn if reserve else _SPAWN  # type: ignore[assignment]


def _take_files(files: dict[int, int]) -> None:
    moved = {theirs: fcntl.fcntl(ours, fcntl.F_DUPFD, _FREE) for theirs, ours in files.items()}
    os.closerange(0, _FREE)
    for theirs, number in moved.items():
        os.dup2(number, theirs)
        os.close(number)


def _open_streams(files: Iterable[int]) -> None:
    """Replace the streams: those of the server were opened for other kinds of files."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    kinds = {"stdin": ("r", "strict"), "stdout": ("w", "strict"), "stderr": ("w", "backslashreplace")}
    for number, (name, (mode, errors)) in enumerate(kinds.items()):
        stream = None
        if number in files:
            stream = open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
            stream.reconfigure(line_buffering=name == "stderr" or os.isatty(number), write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _Reserve:
    """A fork that waits to become the forkserver of the command.

    It is a child of the command as a forkserver is, and it has imported nothing that the command has.
    """

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            request = receive(theirs)
            if request is None:
                os._exit(0)
            main(request, reserve=False)
        theirs.close()

    def spawn(self, path: bytes, args: Sequence[Any], passed: Sequence[int]) -> int:
        """As ``multiprocessing.util.spawnv_passfds``."""
        if not self._pid or not str(args[-1]).startswith(_FORKSERVER):
            return _SPAWN(path, args, passed)
        pid, self._pid = self._pid, 0
        open_ = [number for number in (0, 1, 2) if os.path.exists(f"/proc/self/fd/{number}")]
        with self._connection:
            send(self._connection, argv=[os.fsdecode(path), *args[-2:]], files={n: n for n in (*open_, *passed)})
        return pid


def main(request: Request, *, reserve: bool = True) -> NoReturn:
    """Become a command, run it, and end as it ends."""
    become(request, reserve=reserve)
    code = _run()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # What remains of an interpreter's end takes apart all that torch has imported, in half a second.
    os._exit(code & 0xFF)


def _run() -> int:
    try:
        _run_code()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        # Without the frames of this file and of the server.
        sys.excepthook(type(error), error, error.__traceback__.tb_next.tb_next)  # type: ignore[union-attr]
        return 1
    return 0


def _run_code() -> None:
    """Run the code that the arguments of this process name, in a new main module."""
    arguments = sys.argv[1:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    if arguments[:1] == ["-u"]:
        del arguments[0]
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if arguments[0].startswith("-m"):
        module = arguments[0][2:] or arguments.pop(1)
        sys.argv = arguments
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    elif arguments[0] == "-c":
        code = arguments.pop(1)
        sys.argv = arguments
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), vars(main))
    elif arguments[0].startswith("-"):
        raise SystemExit(f"the warm Python does not know the option {arguments[0]}")
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        with open(arguments[0], "rb") as file:
            source = file.read()
        vars(main)["__file__"] = arguments[0]
        exec(compile(source, arguments[0], "exec"), vars(main))
