"""Runs whose leases or forkserver are stopped or killed: the case in the way says so, and the next one runs."""

import json
import os
import signal
import tempfile

import pytest

from shardproof.harness.worlds import waiting
from shardproof.harness.worlds.lease import Leases
from tests.harness.inner import until

pytestmark = pytest.mark.sampled

QUICK = '''
import os, signal, sys, time
from shardproof.harness.worlds import forkserver, waiting

waiting.NOTICE_SECONDS = 0.3
waiting.STOPPED_SECONDS = 0.6
forkserver.STOPPED_SECONDS = 0.6

look, to_kill = forkserver._blockers, []

def look_and_kill():
    """Kill the forkserver when a case waits for it and looks what is in the way."""
    found = look()
    while to_kill:
        os.kill(to_kill.pop(), signal.SIGKILL)
    return found

forkserver._blockers = look_and_kill

def pytest_runtest_setup(item):
    number = forkserver._pid()
    with open("forkservers", "a") as file:
        file.write(f"{number}\\n")
    action = getattr(item.function, "before", "")
    if action in ("stop", "stop, then kill"):
        os.kill(number, signal.SIGSTOP)
    if action == "stop, then kill":
        to_kill.append(number)
    if action == "kill":
        os.kill(number, signal.SIGKILL)
        assert forkserver.has_ended(within=10)
'''

CASES = """
import os, signal, time
from shardproof.testing import world

@world(1)
def test_first(rank):
    pass

@world(2)
def test_stopped(rank):
    pass
test_stopped.before = "stop"

@world(1)
def test_after_stopped(rank):
    pass

@world(1)
def test_killed_between_cases(rank):
    pass
test_killed_between_cases.before = "kill"

@world(2)
def test_killed_while_it_starts_a_rank(rank):
    pass
test_killed_while_it_starts_a_rank.before = "stop, then kill"

@world(2)
def test_killed_during_a_case(rank):
    os.kill(os.getppid(), signal.SIGKILL) if rank.index else time.sleep(30)

@world(1)
def test_stopped_during_a_case(rank):
    os.kill(os.getppid(), signal.SIGSTOP)
    assert False, "a failure of its own"

@world(2)
def test_last(rank):
    pass
"""

ONE_CASE = """
from shardproof.testing import world

@world(1, 2)
def test_case(rank):
    pass
"""


def await_end(pid):
    """A forkserver ends by itself soon after the process that started it, unless it is stopped."""
    ended = until(10, lambda: (process := waiting.look_at(pid)) is None or process.has_ended)
    assert ended, f"{waiting.look_at(pid)} is left"


@pytest.mark.nightly
def test_a_stopped_or_killed_forkserver_costs_one_case(pytester, run):
    pytester.makeconftest(QUICK)
    result = run(CASES, "--report", "run.json", "--device", "cpu", own_process=True)
    cases = json.loads(pytester.path.joinpath("run.json").read_text())["cases"]
    verdicts = {case["id"].partition("::test_")[2].partition("[")[0]: case["verdict"] for case in cases}
    texts = {name: case["failure"]["text"] for name, case in zip(verdicts, cases, strict=True) if case["failure"]}
    assert verdicts == {
        "first": "pass",
        "stopped": "harness-error",
        "after_stopped": "pass",
        "killed_between_cases": "pass",
        "killed_while_it_starts_a_rank": "harness-error",
        # Its ranks die with it, which is not the implementation's crash.
        "killed_during_a_case": "harness-error",
        # A stopped forkserver reports no exit code of the world that is replaced.
        "stopped_during_a_case": "fail",
        "last": "pass",
    }
    waits = r"waiting for the fork server to start rank 0 of 2 ranks on cpu: \d+ s so far, held up by pid \d+ "
    killed = "shardproof: the forkserver was stopped and has been killed; the next case gets a new one"
    result.stdout.re_match_lines([rf"shardproof: {waits}\(.*, stopped\); timeout in \d+ s", killed])
    assert texts["stopped"].startswith("gave up after ")
    assert texts["stopped"].endswith(", stopped): the next case gets a new forkserver")
    assert " ended while it started rank 0 of 2 ranks on cpu (" in texts["killed_while_it_starts_a_rank"]
    assert "\n" not in texts["stopped"] + texts["killed_while_it_starts_a_rank"]
    assert "the forkserver ended, and its ranks with it" in texts["killed_during_a_case"]
    assert "a failure of its own" in texts["stopped_during_a_case"]
    for line in set(pytester.path.joinpath("forkservers").read_text().split()):
        await_end(int(line))


@pytest.fixture
def stopped_holder(short_tmp, monkeypatch, holding):
    """A stopped process that holds all cores of the inner run, whose leases are its own."""
    monkeypatch.setenv("TMPDIR", str(short_tmp))
    monkeypatch.setattr(tempfile, "tempdir", None)
    directory = short_tmp / f"shardproof-leases-{os.getuid()}"
    process, ready, _ = holding(lambda: Leases(directory).cores(10_000, alone=True))
    assert ready.wait(10)
    os.kill(process.pid, signal.SIGSTOP)
    yield process
    tempfile.tempdir = None


@pytest.mark.parametrize(
    "options", [(), pytest.param(("-n", "1"), marks=pytest.mark.nightly)], ids=["captured", "xdist"]
)
def test_a_lease_of_a_stopped_process_is_waited_for_visibly_and_not_for_ever(pytester, run, stopped_holder, options):
    pytester.makeconftest(QUICK)
    result = run(ONE_CASE, "--report", "run.json", "--device", "cpu", *options, own_process=True)
    lines = [line for line in result.outlines + result.errlines if line.startswith("shardproof: waiting for")]
    assert lines[0].startswith("shardproof: waiting for a lease on 1 core (")
    assert f"held up by pid {stopped_holder.pid} (" in lines[0] and ", stopped)" in lines[0]
    cases = json.loads(pytester.path.joinpath("run.json").read_text())["cases"]
    assert [case["verdict"] for case in cases] == ["harness-error"] * 2
    for case in cases:
        text = case["failure"]["text"]
        assert text.startswith("gave up after ") and "\n" not in text
        assert text.endswith(f"continue it (kill -CONT {stopped_holder.pid}) or end it")
