"""What a failing, dying, stuck or untidy rank does: its case gets the verdict, the next one passes, nothing stays."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

from shardproof.harness.worlds.world import GRACE_SECONDS
from tests.harness.inner import PYTHONPATH, QUIET, until

pytestmark = pytest.mark.sampled

DEADLINE = 3
OPTIONS = (*QUIET, "--impl", "ddp", "--deadline", str(DEADLINE))

FOLLOWED = """
import ctypes, os, re, signal, sys, threading, time
import torch
import torch.distributed as dist
from torch import nn
import pytest
from shardproof.testing import world
@world(2)
def test_before(rank):
    rank.tmp_path.joinpath(str(rank.index)).write_text("")

@world(2)
def test_wrong(rank):
    os.close(os.open(f"{{rank.index}}-{{os.getpid()}}.pid", os.O_CREAT))
    {body}

@world(2)
def test_after(rank):
    assert len(set(rank.exchange(rank.index))) == 2
    assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a case with this body between two sound ones; the lines that pytest printed."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)

    def run(body, *options, within=DEADLINE + 5, ranks="2"):
        source = FOLLOWED.format(body=body.strip().replace("\n", "\n    "))
        pytester.path.joinpath("test_inner.py").write_text(source.replace("@world(2)", f"@world({ranks})"))
        result = pytester.runpytest_inprocess(*OPTIONS, *options)
        result.assert_outcomes(passed=2, failed=1)
        reports = result.reprec.getreports("pytest_runtest_logreport")
        # Of the world, without the queue for its cores.
        assert max(report.shardproof["seconds"] for report in reports if report.when == "call") < within
        processes = [int(path.stem.partition("-")[2]) for path in pytester.path.glob("*.pid")]
        assert len(processes) == 2
        assert not any(map(is_alive, processes)), "the world was replaced and its ranks are gone"
        return result.stdout

    return run


def is_alive(pid):
    try:
        os.kill(pid, 0)
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (ProcessLookupError, FileNotFoundError):  # it has ended, before or after the signal was sent
        return False


#: What rank 1, or each rank, does, and what is printed of it.
ODD = """
class Odd(Exception):
    def __str__(self):
        raise KeyError("no text")
    def __reduce__(self):
        raise TypeError("no pickle")
raise Odd()
"""
IN_A_THREAD = """
def work():
    raise RuntimeError("in a thread")
thread = threading.Thread(target=work, name="the worker")
thread.start()
thread.join()
"""
# Their pipes are not emptied equally fast, and a rank is not waited for long once another has failed.
MUCH_OUTPUT = """
line = "x" * 1023
for _ in range(50_000):
    print(line)
    print(line, file=sys.stderr)
dist.barrier()
assert False, "after much output"
"""
DIES = "crash: rank 1 of 2:"
CHAOS = {
    "exception-on-one-rank": ("if rank.index == 1: raise ValueError('only here')\ndist.barrier()",
        ["fail: rank 1 of 2:", "ValueError: only here", "rank 0 of 2:", "*still waiting*"]),
    "exception-without-a-text-that-cannot-be-pickled": (ODD, ["fail: every rank of 2:", "*Odd*"]),
    "exception-in-another-thread": (IN_A_THREAD,
        ["fail: every rank of 2:", "RuntimeError: in a thread", "*an exception ended the worker"]),
    "exit-0": ("if rank.index == 1: os._exit(0)\ndist.barrier()", [DIES, "*the rank's process ended: exit code 0*"]),
    "abort": ("if rank.index == 1: sys.stdout.flush(); os.abort()\ndist.barrier()",
        [DIES, "*the rank's process ended: killed by SIGABRT*"]),
    "sigsegv": ("if rank.index == 1: ctypes.string_at(0)\ndist.barrier()",
        [DIES, "*the rank's process ended: killed by SIGSEGV*", "*output of rank 1*",
         "Fatal Python error: Segmentation fault*", "*test_inner.py*"]),
    "sleeps-for-ever": ("time.sleep(600) if rank.index == 1 else None",
        ["hang: rank 1 is at File *test_inner.py*, line 15 in test_wrong, before the case's first*"]),
    # A regular expression that backtracks for years neither releases the lock nor heeds signals. The other rank waits
    # in a collective, but the one outside is the one to name.
    "spins-holding-the-gil": ("re.match('(a+)+$', 'a' * 60 + 'b') if rank.index == 0 else None\ndist.barrier()",
        ["hang: rank 1 is in barrier, collective 1 on ranks 0-1 *, and rank 0 is missing from it",
         "rank 0 is at File *test_inner.py*, line 15 in test_wrong, before the case's first collective"]),
    # Also where no host waits: a case has not finished before its device has.
    "has-finished-and-is-missing": (
        "dist.all_reduce(torch.ones(4, device=rank.device)) if rank.index == 1 else None",
        ["hang: rank 1 is in all_reduce sum float32 16 B, collective 1 on ranks 0-1 *, and rank 0 is missing from it",
         "rank 0 has already finished the case*"]),
    "much-output": (MUCH_OUTPUT, ["fail: every rank of 2:", "*after much output*"]),
}  # fmt: skip
#: Seconds in which it is over, where no deadline is met.
WITHIN = {"exception-on-one-rank": GRACE_SECONDS + 2}
WITHIN |= dict.fromkeys(("exit-0", "abort", "sigsegv"), GRACE_SECONDS + 3)


@pytest.mark.parametrize("what", CHAOS)
def test_chaos(run, what):
    body, lines = CHAOS[what]
    printed = run(body, within=WITHIN.get(what, DEADLINE + 5))
    printed.fnmatch_lines(lines)
    assert len(printed.str()) < 2_000_000


@pytest.mark.parametrize("what", ["exception-on-one-rank", "sigsegv", "sleeps-for-ever"])
def test_chaos_of_ranks_with_hash_seeds_of_their_own(run, what):
    body, lines = CHAOS[what]
    run(body, ranks="2, own_hash_seeds=True").fnmatch_lines(lines)


def test_chaos_wrong_order_of_collectives_is_stopped_before_it_blocks(run):
    body = "for n in [4, 8] if rank.index == 0 else [8, 4]: dist.all_reduce(torch.ones(n, device=rank.device))"
    lines = [f"  rank {rank}: 1 all_reduce sum float32 {16 + 16 * rank} B" for rank in range(2)]
    printed = run(body, "--check-collectives", within=DEADLINE)
    printed.fnmatch_lines(["fail: collective 1 on ranks 0-1 differs between ranks", *lines])


# Leaving things behind


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("torch.set_grad_enabled(False)", "gradient mode: True became False"),
        ("torch.set_default_dtype(torch.float64)", "default dtype: torch.float32 became torch.float64"),
        ("torch.set_default_device('meta')", "default device: cpu became meta"),
        ("torch.autocast(rank.device.type).__enter__()", "autocast: False became True"),
        ("torch.use_deterministic_algorithms(True)", "deterministic algorithms: False became True"),
        ("torch.set_anomaly_enabled(True)", "anomaly detection: False became True"),
        ("dist.new_group([0, 1])", "process groups: 0 became 1"),
        ("os.environ['SOME_NAME'] = 'x'", "environment variables changed: SOME_NAME"),
        ("os.chdir('/')", "working directory: * became /"),
        ("sys.leaked = open(__file__)", "open files: *test_inner.py"),
        ("sys.leaked = nn.Linear(2, 2)", "modules: Linear; often a hook or closure keeps them"),
        ("threading.Thread(target=time.sleep, args=(60,), name='left', daemon=True).start()", "threads: left"),
        ("nn.modules.module.register_module_forward_hook(print)", "modules' global forward hooks: 0 became 1"),
    ],
)
def test_chaos_leak_fails_its_case_by_name(run, body, told):
    run(body).fnmatch_lines([f"fail: leak: {told} (on ranks 0-1)"])


# On devices


on_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@on_devices
def test_chaos_leak_of_device_memory_fails_its_case_by_name(run):
    told = "device memory: grew by 4194304 bytes"
    run("sys.leaked = torch.ones(1 << 20, device=rank.device)").fnmatch_lines([f"fail: leak: {told} (on ranks 0-1)"])


@on_devices
def test_chaos_out_of_memory_on_a_device(run):
    lines = run("torch.empty(1 << 45, dtype=torch.uint8, device=rank.device)")
    lines.fnmatch_lines(["fail: every rank of 2:", "*CUDA out of memory*"])


@on_devices
def test_chaos_kernel_fails(run):
    """What a device-side assertion leaves of a rank's context is of no use to the next case."""
    wrong = "torch.ones(1, device=rank.device)[torch.tensor([5], device=rank.device)].cpu()"
    lines = run(f"if rank.index == 1: {wrong}\ndist.barrier()")
    lines.fnmatch_lines(["fail: rank 1 of 2:", "*device-side assert*"])


@on_devices
def test_chaos_hang_on_devices_has_what_torchs_flight_recorder_says(run, pytester):
    body = "if rank.index == 0: dist.all_reduce(torch.ones(3, device=rank.device))"
    lines = run(body, "--report", "run.json", within=DEADLINE + 10)
    lines.fnmatch_lines(
        [
            "hang: *",
            "torch's flight recorder:",
            "  * of group 0 (default_pg): all_reduce Float *3*, rank 0; rank 1 is behind, after *",
            "dumps of torch's flight recorder: run.json.flight/test_inner-py-test_wrong*",
        ]
    )
    assert len([*pytester.path.glob("run.json.flight/*/rank[01]")]) == 2


def test_chaos_case_may_not_skip_by_itself(run):
    run('pytest.skip("on a whim")').fnmatch_lines(["*a case must not skip by itself: use @needs (on a whim)*"])


# The controller


STUCK = """
import os, time
from shardproof.testing import deadline, world

@world(2, own_hash_seeds={own_hash_seeds})
@deadline(300)
def test_stuck(rank):
    with open(f"pid{{rank.index}}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"pid{{rank.index}}", f"rank{{rank.index}}")
    time.sleep(300)
"""


@contextlib.contextmanager
def started(folder, *options):
    """A run of pytest in this folder.

    It takes Ctrl-C and SIGHUP even where a shell in the background, or nohup, ignores them for children. It is killed
    in the end, also by a test that fails: it would hold the host's cores until its deadline.
    """
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        command = [sys.executable, "-m", "pytest", *options]
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("signals", "own_hash_seeds"),
    [([signal.SIGINT, signal.SIGINT], False), ([signal.SIGINT], True), ([signal.SIGKILL], True)],
    ids=["ctrl-c-twice", "ctrl-c-own-hash-seeds", "sigkill-own-hash-seeds"],
)
def test_chaos_controller_ends(tmp_path, signals, own_hash_seeds):
    """However pytest ends, no rank outlives it by 5 seconds; test_journal.py has the other signals."""
    tmp_path.joinpath("test_inner.py").write_text(STUCK.format(own_hash_seeds=own_hash_seeds))
    with started(tmp_path, *OPTIONS, "test_inner.py") as process:
        files = [tmp_path / f"rank{index}" for index in range(2)]
        until(60, lambda: all(file.exists() for file in files))
        ranks = [int(file.read_text()) for file in files]
        assert all(map(is_alive, ranks))
        process.send_signal(signals[0])
        for number in signals[1:]:
            time.sleep(0.2)  # while pytest handles the first, of which it shows nothing
            process.send_signal(number)
        assert until(5, lambda: not any(map(is_alive, ranks)))
        assert process.wait(10) != 0
