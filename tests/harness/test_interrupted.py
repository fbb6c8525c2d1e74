"""Whatever interrupts the controller while a world runs a case, the case's results do not become those of the next."""

import multiprocessing.connection
import os
import pathlib

import pytest

from shardproof.harness.collectives.board import Board
from shardproof.harness.worlds import world
from tests.harness.inner import QUIET

pytestmark = pytest.mark.sampled

CASES = """
import os, pathlib, time
from shardproof.testing import deadline, world

@world(2)
def test_that_starts_the_world(rank):
    pathlib.Path(f"{rank.index}-{os.getpid()}.pid").touch()

@world(2)
@deadline(1)
def test_interrupted(rank):
    time.sleep(0.5)
    BODY

@world(2)
def test_sound(rank):
    pathlib.Path(f"{rank.index}-{os.getpid()}.pid").touch()

@world(2)
def test_wrong(rank):
    assert False, "a failure of its own"
"""

FAILS = "assert False, 'a failure of the interrupted case'"
HANGS = "time.sleep(60 * rank.index)"


class Interruption(Exception):
    """As pytest-timeout raises one from a signal's handler."""


class Interrupter:
    """Raises once while the case `test_interrupted` runs, before or after a call of a function of the controller."""

    def __init__(self, owner, name, when):
        self.owner, self.name, self.when = owner, name, when
        self.raised = False

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        if not pyfuncitem.name.startswith("test_interrupted"):
            return (yield)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.owner, self.name, self.around(getattr(self.owner, self.name)))
            return (yield)

    def around(self, function):
        def interrupted(*args, **kwargs):
            if self.raised:
                return function(*args, **kwargs)
            self.raised = True
            if self.when == "after":
                function(*args, **kwargs)
            raise Interruption(f"{self.when} {self.name}")

        return interrupted


CONNECTION = multiprocessing.connection.Connection
POINTS = [
    (CONNECTION, "send", FAILS), (world, "wait", FAILS), (CONNECTION, "recv", FAILS),
    (world.RankProcess, "new_output", FAILS), (world.World, "_collect", FAILS), (Board, "entries", HANGS),
    (world, "dump_stacks", HANGS), (world, "stacks", HANGS), (world, "diagnose", HANGS),
]  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("owner", "name", "body"), POINTS, ids=[name for _, name, _ in POINTS])
def test_an_interrupted_case_keeps_its_results(pytester, owner, name, body, when):
    interrupter = Interrupter(owner, name, when)
    pytester.path.joinpath("test_inner.py").write_text(CASES.replace("BODY", body))
    result = pytester.runpytest_inprocess(*QUIET, "--impl", "ddp", plugins=[interrupter])
    assert interrupter.raised
    result.assert_outcomes(passed=2, failed=2)
    every = result.reprec.getreports("pytest_runtest_logreport")
    reports = {one.nodeid.partition("::")[2].partition("[")[0]: one for one in every if one.when == "call"}
    assert f"Interruption: {when} {name}" in reports["test_interrupted"].longreprtext
    assert reports["test_sound"].outcome == "passed"
    assert "a failure of its own" in reports["test_wrong"].longreprtext
    assert "of the interrupted case" not in reports["test_wrong"].longreprtext
    processes = [path.stem.partition("-")[2] for path in pytester.path.glob("*.pid")]
    assert len(processes) == 4, "the interrupted case's world ran no other"
    assert not any(pathlib.Path(f"/proc/{number}").exists() for number in processes)


def test_an_answer_of_another_job_is_noticed(monkeypatch):
    """The last line of defence: with worlds that are taken out of the pool, none arrives."""
    ours, theirs = multiprocessing.connection.Pipe()
    theirs.send(world.Result(3, 0, "pass"))
    lone = object.__new__(world.World)
    lone.ranks = [world.RankProcess(None, ours, pathlib.Path(os.devnull))]
    job = world.Job(4, "m", "p", "f", "ddp", b"", 0, 0, "", 1.0)
    answer = lone._receive(0, job)
    assert (answer.number, answer.verdict) == (4, "harness-error")
    assert answer.text == "the rank answered job 3 during job 4"
