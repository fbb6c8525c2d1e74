"""A run that signals end: soon, without a traceback, and with nothing left of it."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid

import pytest

from tests.harness.inner import PYTHONPATH, QUIET, until

pytestmark = pytest.mark.sampled

CASES = """
import os, pathlib, time
import pytest
from shardproof.testing import deadline, world

@world(2)
@deadline(300)
@pytest.mark.parametrize("number", range(8))
def test_case(rank, number):
    with open(f"/dev/shm/{os.environ['MARK']}-{os.getpid()}", "w"):
        pathlib.Path(f"{rank.index}-{os.getpid()}.began").touch()
        os.unlink(f"/dev/shm/{os.environ['MARK']}-{os.getpid()}")
        time.sleep(300)
"""

#: Lock files that all runs of a user share, and that stay.
LEASES = f"shardproof-leases-{os.getuid()}"

#: What torch makes in any process that imports its compiler, and pytest for the next runs.
OF_OTHERS = ("torchinductor_", "pytest-of-")


class Run:
    """A run of pytest in a session of its own, with a temporary directory and a mark in its environment."""

    def __init__(self, folder, *options):
        self.mark = f"signals-{uuid.uuid4().hex[:12]}"
        self.folder, self.temporary = folder, folder / "t"
        self.temporary.mkdir()
        folder.joinpath("test_inner.py").write_text(CASES)
        environment = os.environ | {"PYTHONPATH": PYTHONPATH, "TMPDIR": str(self.temporary), "MARK": self.mark}
        arguments = [*QUIET, "--impl", "ddp", "--device", "cpu", "--report", "run.json", *options]
        before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
        self.shared = set(os.listdir("/dev/shm"))
        try:
            with open(folder / "output", "wb") as output:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "pytest", *arguments], cwd=folder, env=environment, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def output(self):
        return (self.folder / "output").read_text(errors="replace")

    def send(self, number):
        """Send a signal: SIGINT to all processes of the session, as a terminal does."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)

    def has_begun(self):
        return any(self.folder.glob("*.began"))

    def processes(self):
        """The processes that have the mark."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def left(self):
        """What there still is of the run."""
        files = [one for one in os.listdir(self.temporary) if one != LEASES and not one.startswith(OF_OTHERS)]
        return {"processes": self.processes(), "temporary": files, "shared": set(os.listdir("/dev/shm")) - self.shared}

    def kill(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def begun(folder, *options, moment="in a case"):
    run = Run(folder, *options)
    try:
        if moment == "in a case":
            assert until(150, run.has_begun), run.output
        else:  # the forkserver imports torch, and so does the controller
            assert until(60, lambda: (folder / "run.json.partial").exists()), run.output
        yield run
    finally:
        run.kill()


NOTHING = {"processes": [], "temporary": [], "shared": set()}


@pytest.mark.parametrize("moment", ["in a case", "at the start"])
@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "workers"])
@pytest.mark.parametrize(
    "signals",
    [
        [signal.SIGTERM], [signal.SIGHUP], [signal.SIGINT], [signal.SIGTERM] * 2, [signal.SIGINT] * 2,
        [signal.SIGINT, signal.SIGTERM], [signal.SIGINT] * 3,
    ],
    ids=lambda signals: "-".join(one.name for one in signals),
)  # fmt: skip
def test_nothing_is_left_of_a_run_that_signals_end(tmp_path, signals, options, moment):
    with begun(tmp_path, *options, moment=moment) as run:
        for number in signals:
            run.send(number)
            time.sleep(0.3)  # while pytest handles it
        code = run.process.wait(100)
        assert until(30, lambda: run.left() == NOTHING), (run.left(), run.output)
    assert "Traceback" not in run.output, run.output
    if len(signals) == 1:
        assert code == 2, run.output
    else:
        assert code in (2, -signals[-1], -signals[0]), run.output


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_run_of_four_workers_ends_within_8_seconds(tmp_path, number):
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 2 * cores:
        pytest.skip(f"{cores} cores are busy with other things: the load is {load:.0f}")
    with begun(tmp_path, "-n", "4") as run:
        began = time.monotonic()
        run.send(number)
        assert run.process.wait(60) == 2
        seconds = time.monotonic() - began
    assert seconds <= 8, run.output
