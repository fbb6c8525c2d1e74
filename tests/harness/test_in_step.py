"""After which failures the ranks of a world run further cases."""

import json

import pytest

from shardproof.harness.collectives.board import Announcement
from shardproof.harness.worlds import world
from shardproof.harness.worlds.jobs import Result

pytestmark = pytest.mark.sampled

CASES = """
import os, pathlib, time
import pytest, torch
import torch.distributed as dist
from shardproof.testing import world
from shardproof.harness.parity import exchange
from shardproof.harness.worlds import loop

def fails():
    raise ValueError("a bug of an implementation")

def alike(rank):
    fails()

def unequal_values(rank):
    assert rank.index == 7

def after_collectives(rank):
    dist.all_reduce(torch.ones(2))
    fails()

def elsewhere(rank):
    if rank.index:
        fails()
    fails()

def one_more_collective(rank):
    if rank.index:
        dist.all_reduce(torch.ones(2), async_op=True)
    fails()

def other_collectives(rank):
    dist.all_reduce(torch.ones(2 + rank.index), async_op=True)
    fails()

def within_an_exchange(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange.os, "read", lambda *a: fails())
        rank.exchange(0)

def stuck(rank):
    loop._finish_queued = lambda device: time.sleep(600)
    fails()

def cannot_finish(rank):
    loop._finish_queued = lambda device: fails()
    fails()

def leaves(rank):
    os.environ["LEFT"] = "1"
    fails()

def replaces(rank):
    torch.optim.SGD.step = lambda self: None

def replaces_and_fails(rank):
    replaces(rank)
    fails()

def note(rank, name):
    pathlib.Path(f"{name}-{rank.index}").write_text(str(os.getpid()))
"""

SEPARATE = """
import dataclasses
from shardproof.harness.adapters.reference import ReferenceAdapter
class Separate(ReferenceAdapter):
    name = "separate"
    traits = dataclasses.replace(ReferenceAdapter.traits, isolation="adapter")
"""

CASE = """
@world(2)
def test_{name}(rank):
    note(rank, "{name}")
    {call}
"""


@pytest.fixture
def processes(pytester, run):
    """Run a case for each of these names, the functions of ``CASES``, and then one that passes.

    Returns the pids of each, and all verdicts.
    """

    def processes(*names, options=()):
        source = CASES + "".join(CASE.format(name=name, call=f"{name}(rank)") for name in names)
        run(source + CASE.format(name="after", call=""), "--report", "run.json", "--device", "cpu", *options)
        cases = json.loads(pytester.path.joinpath("run.json").read_text())["cases"]
        pids = [
            [pytester.path.joinpath(f"{name}-{rank}").read_text() for rank in range(2)] for name in (*names, "after")
        ]
        return pids, [case["verdict"] for case in cases]

    return processes


def test_ranks_that_raise_at_the_same_place_run_further_cases(processes):
    pids, verdicts = processes("alike", "unequal_values", "after_collectives")
    assert pids == [pids[0]] * 4
    assert verdicts == ["fail", "fail", "fail", "pass"]


@pytest.mark.parametrize(
    "what",
    ["elsewhere", "one_more_collective", "other_collectives", "within_an_exchange", "stuck", "cannot_finish", "leaves"],
)
def test_ranks_that_may_not_be_in_step_are_replaced(processes, what):
    pids, verdicts = processes(what)
    assert not set(pids[0]) & set(pids[1])
    assert verdicts == ["fail", "pass"]


def test_an_adapter_with_ranks_of_its_own_gets_others_if_an_exception_leaves_torch_changed(processes, pytester):
    pytester.syspathinsert()
    pytester.makepyfile(separate=SEPARATE)
    pids, verdicts = processes("replaces", "alike", "replaces_and_fails", options=("--impl", "separate:Separate"))
    assert pids[0] == pids[1] == pids[2] != pids[3]
    assert verdicts == ["pass", "fail", "fail", "pass"]


def announced(number, text="all_gather float32 8 B", *, group="dp", ranks=(0, 1)):
    return Announcement(1, number, group, ranks, text)


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        ([], [], True),
        ([announced(4), announced(5)], [announced(5)], True),
        ([announced(5)], [announced(4)], False),
        ([announced(5)], [announced(5, "all_reduce float32 8 B")], False),
        ([announced(5)], [], False),
        ([], [announced(5)], False),
        ([announced(1, group="mine", ranks=(0,))], [announced(3, group="other", ranks=(1,))], True),
        ([announced(2, "all_to_all float32 8 B")], [announced(2, "all_to_all float32 12 B")], True),
    ],
)
def test_the_last_collective_of_each_group_is_compared(first, second, alike):
    assert world.announced_alike({0: first, 1: second}) is alike


def test_what_is_no_exception_is_not_alike():
    texts = ['Traceback\n  File "a", line 1\nValueError', "1 leaf is missing"]
    for text in texts:
        results = [Result(1, rank, "fail", text) for rank in range(2)]
        assert world.failed_alike(results) is text.startswith("Traceback")
    assert not world.failed_alike([Result(1, 0, "fail", texts[0]), Result(1, 1, "crash", texts[0])])
