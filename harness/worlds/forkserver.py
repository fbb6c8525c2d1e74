"""The forkserver from which ranks are forked, and the first function that a rank runs.

The forkserver has imported torch once and has initialised no device. Does not import torch at module level, so that the
controller can start ranks without importing torch.
"""

import contextlib
import ctypes
import dataclasses
import importlib
import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess

import shardproof
from shardproof.harness.worlds import scratch, waiting
from shardproof.harness.worlds.jobs import RankSpec
from shardproof.harness.worlds.torchrun import meeting
from shardproof.harness.worlds.waiting import Blockers, Process, Wait, WaitedTooLong

#: The module that the forkserver imports once, so that starting a rank costs about a fork.
PRELOADED = "shardproof.harness.worlds.preloaded"

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
        context().set_forkserver_preload([PRELOADED])
        with _environment():
            # Which lets signals through when it has started its process, and so would while the forkserver starts.
            resource_tracker.ensure_running()
            with _without_interrupts():
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
        f"the fork server to start {what}", bound=FORK_SECONDS, stopped_bound=STOPPED_SECONDS, blockers=_blockers,
        advice=_REPLACED, stopped_advice=_REPLACED,
    )  # fmt: skip
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
    if was_stopped := is_stopped():
        kill()
    return was_stopped


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
def _without_interrupts() -> Iterator[None]:
    """Let a process that starts meanwhile never get SIGINT: a terminal sends it to all, and the controller decides.

    The forkserver ignores it only once it has imported torch.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set the variables that the forkserver and its ranks inherit, and restore the controller's own afterwards."""
    # In the controller's order. Where shardproof is installed its folder has a torch too, and in front of a user's
    # PYTHONPATH the ranks would test that one, and not the one that the controller names.
    root = str(pathlib.Path(shardproof.__file__).parents[1])
    path = os.pathsep.join(dict.fromkeys(filter(None, [*sys.path, root])))
    interfaces = _LOOPBACK if meeting.this_process() is None else {}
    # torch._dynamo makes this directory where it is imported; ranks have another, of their world.
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(scratch.place("compiled"))}
    changes = {**_ENVIRONMENT, **interfaces, **compiled, "PYTHONPATH": path}
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


# In a rank process.

_PR_SET_PDEATHSIG = 1

#: Options of the interpreter with which it would not read its hash seed from the environment.
_DEAF = ("-E", "-I")


def run_rank(connection: Connection | meeting.Channel, spec: RankSpec) -> None:
    """Run this process as a rank until its connection closes."""
    leave_with_the_controller()
    if spec.hash_seed is not None:
        assert isinstance(connection, Connection), "in a job of torchrun a rank keeps the seed of its process"
        _start_anew(connection, spec)
    _run(connection, spec)


def _run(connection: Connection | meeting.Channel, spec: RankSpec) -> None:
    from shardproof.harness.worlds import loop

    loop.main(connection, spec)


def leave_with_the_controller() -> None:
    """Make this process, which the forkserver has forked, end with the forkserver, and that with the controller."""
    # The controller decides how to react to an interrupt.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # for what the rank itself starts
    # The forkserver must exit when the controller does, and its children when the forkserver does. But it runs as long
    # as any process holds the other end of its "alive" pipe, and multiprocessing passes a copy of that end to every
    # child.
    os.close(vars(forkserver._forkserver)["_forkserver_alive_fd"])
    # Lead a new session, so that the processes that the rank starts can be killed with it.
    os.setsid()
    end_with_parent(signal.SIGKILL)


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when the process that has started it ends; Linux alone can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


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
    """Go on, in a new interpreter, as the rank that has left its connection and its spec in a file."""
    path = pathlib.Path(left)
    number, spec = pickle.loads(path.read_bytes())
    path.unlink()
    # What other ranks have from the forkserver.
    importlib.import_module(PRELOADED)
    _run(Connection(number), spec)
