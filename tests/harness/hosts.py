"""Jobs of torchrun for tests: on this host, and on two hosts that are network namespaces of this machine."""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence

from tests.harness.inner import PYTHONPATH, QUIET

NAMES = ("hosta", "hostb")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")

#: Seconds in which a job ends, however busy the machine is.
_MOST_SECONDS = 300

_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_PYTEST = ("-m", "pytest", *QUIET)


def environment(**more: str) -> dict[str, str]:
    """The variables of a job; not those of the run of pytest that starts it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", **more}


def verdicts(report: pathlib.Path) -> dict[str, str]:
    """The verdict of each case of a run file, by function and parameters."""
    return {case["id"].partition("::")[2]: case["verdict"] for case in json.loads(report.read_text())["cases"]}


def torchrun(folder: pathlib.Path, ranks: int, *arguments: str, options: Sequence[str] = (), **more: str):
    """Run a job of so many ranks on this host; returns the completed process, with both streams in ``stdout``."""
    command = [*_TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", *options, *_PYTEST, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, cwd=folder, env=environment(**more), timeout=_MOST_SECONDS, check=False, **streams)


@functools.cache
def why_no_namespaces() -> str:
    """Why this machine can have no hosts in network namespaces; "" if it can."""
    for tool in ("ip", "unshare", "mount"):
        if shutil.which(tool) is None:
            return f"there is no command {tool!r}"
    name = f"sp-{uuid.uuid4().hex[:8]}"
    tried = _ip("netns", "add", name, check=False)
    if tried.returncode:
        return f"network namespaces are not permitted: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


class TwoHosts:
    """Two hosts that a cable connects, with one current directory."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        own = uuid.uuid4().hex[:6]
        self._spaces = [f"sp-{own}-{name}" for name in NAMES]
        self._ends = [f"sp{own}{letter}" for letter in "ab"]
        self._jobs: list[subprocess.Popen[str]] = []
        # Torch elastic looks up the name of its host.
        self._names = folder / "hosts"
        self._names.write_text("127.0.0.1 localhost\n" + "".join(map("{} {}\n".format, _ADDRESSES, NAMES)))

    def connect(self) -> None:
        """Make the hosts and the cable."""
        for space in self._spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        (left, right), (one, other) = self._spaces, self._ends
        _ip("link", "add", one, "netns", left, "type", "veth", "peer", "name", other, "netns", right)
        for space, end, address in zip(self._spaces, self._ends, _ADDRESSES, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", space, "link", "set", end, "up")

    def start(self, ranks: int, *arguments: str, rendezvous: str = "c10d", **more: str) -> None:
        """Start torchrun on both hosts, with so many ranks each; rank 0 is on the first."""
        for number, (space, end, address) in enumerate(zip(self._spaces, self._ends, _ADDRESSES, strict=True)):
            job = [
                *_TORCHRUN, "--nnodes=2", f"--nproc-per-node={ranks}", f"--rdzv-id={self._spaces[0]}",
                f"--rdzv-backend={rendezvous}", *([f"--node-rank={number}"] if rendezvous == "static" else []),
                f"--rdzv-endpoint={_ADDRESSES[0]}:29400", f"--local-addr={address}", *_PYTEST, *arguments,
            ]  # fmt: skip
            alias = f"hostname {NAMES[number]} && mount --bind {self._names} /etc/hosts"
            # In mount and host name spaces of its own, so that nobody else sees the names.
            shell = ["unshare", "--uts", "--mount", "sh", "-c", f'{alias} && exec "$@"', "sh"]
            command, env = ["ip", "netns", "exec", space, *shell, *job], environment(GLOO_SOCKET_IFNAME=end, **more)
            with (self._folder / f"{NAMES[number]}.txt").open("w") as output:
                streams = {"stdout": output, "stderr": subprocess.STDOUT, "text": True}
                self._jobs.append(subprocess.Popen(command, cwd=self._folder, env=env, **streams))

    def await_file(self, path: pathlib.Path) -> None:
        """Wait until a case has made a file."""
        until = time.monotonic() + _MOST_SECONDS
        while not path.exists():
            assert time.monotonic() < until, f"{path} is not there:\n{self.output(0)}\n{self.output(1)}"
            assert self._jobs[0].poll() is None, self.output(0)
            time.sleep(0.02)

    def cut(self) -> None:
        """Pull the cable."""
        _ip("-n", self._spaces[1], "link", "set", self._ends[1], "down")

    def kill(self, host: int) -> None:
        """Kill every process of a host."""
        for pid in _ip("netns", "pids", self._spaces[host], check=False).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def wait(self, host: int) -> int:
        """Return the exit code of torchrun on a host."""
        return self._jobs[host].wait(_MOST_SECONDS)

    def output(self, host: int) -> str:
        """What the processes of a host have printed."""
        path = self._folder / f"{NAMES[host]}.txt"
        return path.read_text() if path.exists() else ""

    def remove(self) -> None:
        """Kill what runs on the hosts, and remove them."""
        for host, space in enumerate(self._spaces):
            self.kill(host)
            _ip("netns", "del", space, check=False)
        for job in self._jobs:
            job.wait()


@contextlib.contextmanager
def two_hosts(folder: pathlib.Path) -> Iterator[TwoHosts]:
    """Two hosts, until the end of the block."""
    hosts = TwoHosts(folder)
    try:
        hosts.connect()
        yield hosts
    finally:
        hosts.remove()
