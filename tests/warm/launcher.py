"""Run a command in a fork of the server beside this file, as its own process would."""

import array
import json
import os
import signal
import socket
import sys

server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "socket"))
files = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
files = [number for number in files if number != server.fileno()]
request = json.dumps({"argv": sys.argv, "cwd": os.getcwd(), "environment": dict(os.environ), "files": files}).encode()
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
server.sendmsg([len(request).to_bytes(4, "little")], rights)
server.sendall(request)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
for number in files:
    # The command has them now, and its peers wait until nobody else has.
    os.close(number)
answer = server.recv(4)
code = int.from_bytes(answer, "little", signed=True) if answer else -signal.SIGKILL
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
os._exit(code)
