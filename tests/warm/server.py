"""The process that has imported what most commands need, and forks for each of them.

Usage: ``server.py FOLDER``. It listens on ``FOLDER/socket`` and ends with the process whose id ``FOLDER/owner`` has. It
imports nothing of this project.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import selectors
import shutil
import signal
import socket
import sys

import program
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.run
import torch.distributed.tensor  # noqa: F401


class Server:
    """Forks for each connection, and connects a command with its launcher.

    Args:
        listener: the socket on which launchers connect.
        owner: the id of the process with which the server ends.
    """

    def __init__(self, listener: socket.socket, owner: int) -> None:
        self._listener = listener
        self._owner = os.pidfd_open(owner)
        self._running: dict[int, tuple[int, socket.socket]] = {}

    def requests(self) -> program.Request | None:
        """Serve launchers until the owner has ended; returns a request in each fork, and None in the server."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
            selector.register(self._owner, selectors.EVENT_READ, None)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        for pid, _connection in self._running.values():
                            os.kill(pid, signal.SIGKILL)
                        return None
                    if (request := key.data(selector, key.fileobj)) is not None:
                        return request

    def _accept(self, selector: selectors.BaseSelector, listener: socket.socket) -> program.Request | None:
        connection, _ = listener.accept()
        request = program.receive(connection)
        if request is None:
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            return request
        for number in request.files.values():
            os.close(number)
        process = os.pidfd_open(pid)
        self._running[process] = (pid, connection)
        selector.register(process, selectors.EVENT_READ, self._ended)
        selector.register(connection, selectors.EVENT_READ, lambda selector, _: self._signal(selector, process))
        return None

    def _signal(self, selector: selectors.BaseSelector, process: int) -> None:
        """Pass a launcher's signals on; its end kills the command."""
        pid, connection = self._running[process]
        numbers = connection.recv(16) or [signal.SIGKILL]
        for number in numbers:
            os.kill(pid, number)
        if numbers == [signal.SIGKILL]:
            selector.unregister(connection)

    def _ended(self, selector: selectors.BaseSelector, process: int) -> None:
        pid, connection = self._running.pop(process)
        selector.unregister(process)
        os.close(process)
        if connection in selector.get_map():
            selector.unregister(connection)
        _, status = os.waitpid(pid, 0)
        with connection, contextlib.suppress(OSError):  # its launcher has ended
            connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))


def main() -> program.Request | None:
    """Serve; returns in each fork, with what it has to do."""
    folder = pathlib.Path(sys.argv[1])
    # A shell that starts the tests in the background ignores it for them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Whatever the imports have made stays shared with the forks: a collection writes to each object that it looks at.
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(16)
        owner = int((folder / "owner").read_text())
        print("ready", flush=True)
        request = Server(listener, owner).requests()
        if request is None:
            # The owner does it too, unless it was killed.
            shutil.rmtree(folder, ignore_errors=True)
        return request


if __name__ == "__main__" and (found := main()) is not None:
    program.main(found)
