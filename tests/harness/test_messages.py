"""What a user reads of failures: bounded, once for ranks and cases that fail alike, with what explains them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from shardproof.harness.verdicts.texts import MOST_CHARACTERS, MOST_OF_A_RANK
from tests.harness.inner import CASE

DEADLINE = 2

EIGHT = """
import os, signal, time
import torch
import torch.distributed as dist
from shardproof.testing import world
@world(8)
def test_case(rank):
    for size in (4, 8, 16):
        dist.all_reduce(torch.ones(size))
    if rank.index == 5:
        {body}
    dist.all_reduce(torch.ones(32))
"""

LAST = [
    "last collectives, and the ranks that entered them:",
    "  3 on ranks 0-7: all_reduce sum float32 64 B, all",
    "  4 on ranks 0-7: all_reduce sum float32 128 B, all but rank 5",
]


def lines_of(result):
    """What was printed between the headings of pytest."""
    lines = result.stdout.lines
    return lines[next(i for i, line in enumerate(lines) if "FAILURES" in line) : -1]


def test_a_hang_of_eight_ranks_is_short_and_complete(run):
    result = run(EIGHT.format(body="time.sleep(600)"), "--deadline", str(DEADLINE))
    result.stdout.fnmatch_lines(
        [
            "hang: ranks 0-4, 6-7 are in all_reduce sum float32 128 B, collective 4 on ranks 0-7 (group *), "
            "and rank 5 is missing from it",
            'rank 5 is at File "*test_inner.py", line 11 in test_case, after all_reduce sum float32 64 B',
            *LAST,
            "ranks 0-4, 6-7 of 8:",
            '  File "*test_inner.py", line 12 in test_case',
            "rank 5 of 8:",
        ]
    )
    assert len(lines_of(result)) <= 40
    assert "forkserver.py" not in result.stdout.str(), "the frames below the case are those of the harness"


def test_a_crash_of_eight_ranks_is_short_and_shows_the_collectives(run):
    result = run(EIGHT.format(body="os.kill(os.getpid(), signal.SIGSEGV)"))
    result.stdout.fnmatch_lines(
        [
            "crash: rank 5 of 8:",
            "the rank's process ended: killed by SIGSEGV",
            "rank* lost the connection to it",
            *LAST,
            "*output of rank 5*",
            "FAILED *crash: rank 5 of 8: the rank's*",
        ]
    )
    assert len(lines_of(result)) <= 40
    assert "closed by peer" not in result.stdout.str()
    assert "--check-collectives" not in result.stdout.str(), "all ranks announced the same: it would not help"


def test_a_crash_after_different_collectives_advises_to_check_them(run):
    body = "dist.all_reduce(torch.ones(8 if rank.index else 4)); os._exit(3)"
    result = run("import os, torch, torch.distributed as dist\n" + CASE.format(body=body))
    result.stdout.fnmatch_lines(
        [
            "crash: *",
            "  1 on ranks 0-1: all_reduce sum float32 16 B, rank 0 only",
            "  1 on ranks 0-1: all_reduce sum float32 32 B, rank 1 only",
            "the ranks announced different collectives on one group: --check-collectives stops them before they enter",
        ]
    )


@pytest.mark.parametrize(
    ("body", "first", "second"),
    [
        (
            "dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank.index else dist.ReduceOp.SUM)",
            "all_reduce sum float32 16 B",
            "all_reduce max float32 16 B",
        ),
        (
            "dist.broadcast(torch.ones(4), src=rank.index)",
            "broadcast from rank 0 float32 16 B",
            "broadcast from rank 1 float32 16 B",
        ),
        (
            "dist.reduce(torch.ones(4), dst=rank.index)",
            "reduce sum to rank 0 float32 16 B",
            "reduce sum to rank 1 float32 16 B",
        ),
    ],
    ids=["operator", "root", "root of a reduction"],
)
@pytest.mark.parametrize("is_recorded", [False, True], ids=["methods", "recorder"])
def test_operators_and_roots_are_checked(run, body, first, second, is_recorded):
    phase = "forward " if is_recorded else ""
    check_is_stopped(run, RECORDED + body if is_recorded else body, phase + first, phase + second)


def test_operators_of_functional_collectives_are_checked(run):
    """They pass no method of ``ProcessGroup``, so that only a Recorder sees them."""
    body = f"{RECORDED}functional.all_reduce(torch.ones(4), 'max' if rank.index else 'sum', dist.group.WORLD).sum()"
    check_is_stopped(run, body, "forward all_reduce sum float32 16 B", "forward all_reduce max float32 16 B")


RECORDED = "with Recorder(announcer=rank.announcer).during('forward'): "

IMPORTS = """
import torch, torch.distributed as dist, torch.distributed._functional_collectives as functional
from shardproof.harness.collectives.recorder import Recorder
"""


def check_is_stopped(run, body, first, second):
    result = run(IMPORTS + CASE.format(body=body), "--check-collectives", "--deadline", "5")
    told = [f"  rank 0: 1 {first}", f"  rank 1: 1 {second}"]
    result.stdout.fnmatch_lines(["fail: collective 1 on ranks 0-1 differs between ranks", *told])


def test_what_may_differ_between_ranks_is_not_checked(run):
    """The parts of an all_to_all, and what only the root of a gather and of a scatter passes."""
    source = """
import torch, torch.distributed as dist
from shardproof.testing import world
from shardproof.harness.collectives.recorder import Recorder
@world(2)
def test_case(rank):
    def exchange():
        mine = [1, 2] if rank.index == 0 else [3, 4]
        theirs = [1, 3] if rank.index == 0 else [2, 4]
        dist.all_to_all_single(torch.ones(sum(theirs)), torch.ones(sum(mine)), theirs, mine)
        dist.gather(torch.ones(3), [torch.ones(3)] * 2 if rank.index == 0 else None, dst=0)
        dist.scatter(torch.ones(3), [torch.ones(3)] * 2 if rank.index == 0 else None, src=0)
    exchange()
    with Recorder(announcer=rank.announcer).during("forward"):
        exchange()
"""
    run(source, "--check-collectives").assert_outcomes(passed=1)


def test_tracebacks_that_differ_in_the_rank_alone_are_printed_once(run):
    body = "raise RuntimeError(f'rank {rank.index} of {rank} at {hex(id(rank))}')"
    result = run(CASE.replace("world(2)", "world(4)").format(body=body))
    result.stdout.fnmatch_lines(["fail: every rank of 4, alike but for ranks, addresses and times:"])
    assert result.stdout.str().count("Traceback") == 1


def test_other_values_at_the_same_place_are_one_line_a_rank(run):
    result = run(CASE.replace("world(2)", "world(4)").format(body="assert rank.index == 9"))
    result.stdout.fnmatch_lines(["fail: rank 0 of 4:", "rank 3 of 4, at the same place: AssertionError: assert 3 == 9"])
    assert result.stdout.str().count("Traceback") == 1


def test_equal_outputs_of_ranks_are_printed_once(run):
    body = "print('alike on rank', rank.index); print('same' if rank.index < 3 else 'other'); assert False"
    result = run(CASE.replace("world(2)", "world(4)").format(body=body))
    result.stdout.fnmatch_lines(
        ["*output of rank 0; ranks 1-2 alike*", "alike on rank 0", "same", "*output of rank 3*"]
    )
    assert result.stdout.str().count("same\n") == 1


def test_a_failure_of_a_hundred_megabytes_is_bounded_in_the_rank(run, pytester):
    body = "raise ValueError('begin ' + 'x' * 100_000_000 + f' end of rank {rank.index}')"
    result = run(CASE.format(body=body), "--report", "run.json")
    result.stdout.fnmatch_lines(["*ValueError: begin xxx*", "... 99* characters left out ...", "*xxx end of rank 0"])
    (case,) = json.loads(pytester.path.joinpath("run.json").read_text())["cases"]
    assert MOST_OF_A_RANK < len(case["failure"]["text"]) < MOST_CHARACTERS
    assert len(result.stdout.str()) < 2 * MOST_CHARACTERS


ALIKE = """
import pytest
from shardproof.testing import world
from shardproof.harness.verdicts.finding import Finding, Location
from shardproof.harness.verdicts.finding import Stage
@world(2)
@pytest.mark.parametrize("n", range(12))
def test_case(rank, n):
    stage = Stage.LOSS if n == 5 else Stage.GRADIENT
    location = Location(stage=stage, step=0, rank=rank.index, name=f"layers.{n}")
    rank.agree(Finding(location, f"sharded {n}.5, baseline {n}"), title="the runs differ")
def test_plain():
    assert False
"""


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_failures_that_are_alike_are_printed_once_with_their_cases(run, pytester, options):
    result = run(ALIKE, "--report", "run.json", "--junitxml", "junit.xml", *options, own_process=bool(options))
    result.assert_outcomes(failed=13)
    printed = result.stdout.str()
    assert printed.count("  sharded ") == 2
    result.stdout.fnmatch_lines(["10 more fail alike, but for numbers and names (-v prints each):"])
    listed = printed[printed.index("10 more fail alike") :].partition("\n__")[0].partition("\n==")[0]
    listed, _, command = listed.partition("\nreproduce: ")
    assert listed.count("[ddp-w2-") == 10
    assert command.count("[ddp-w2-") == 1 and len(command.splitlines()) == 1, "the command is last"
    assert printed.count("FAILED test_inner.py::test_case[ddp-w2-") == 12, "the summary names each"
    assert "def test_plain" in printed, "other tests are printed as ever"
    # Every record and the file for CI have their own texts.
    texts = [case["failure"]["text"] for case in json.loads(pytester.path.joinpath("run.json").read_text())["cases"]]
    assert sorted(text.count(".5, baseline") for text in texts) == [1] * 12 and len(set(texts)) == 12
    failures = [*ElementTree.parse(pytester.path / "junit.xml").iter("failure")]
    assert sum(".5, baseline" in (failure.text or "") for failure in failures) == 12
    assert sum(failure.get("message").startswith("fail: the runs differ: ") for failure in failures) == 12


def test_every_failure_is_printed_on_request(run):
    assert run(ALIKE, "-v").stdout.str().count("  sharded ") == 12


def test_cases_that_one_fault_ends_are_printed_once(run, pytester):
    """Where the error is raised below the case, it is the same from whichever case."""
    pytester.syspathinsert()
    pytester.path.joinpath("broken_adapter.py").write_text(BROKEN)
    source = "from shardproof.harness import models\nfrom shardproof.testing import world\n" + "".join(
        f"@world(2)\ndef test_{name}(rank):\n    rank.run(models.MLP({dim}))\n"
        for name, dim in (("one", 4), ("two", 8))
    )
    result = run(source, "--impl", "broken_adapter:Broken")
    result.assert_outcomes(failed=2)
    assert result.stdout.str().count("Traceback") == 1
    result.stdout.fnmatch_lines(["1 more fail*alike*", "  test_inner.py::test_two *"])


BROKEN = """
from shardproof.harness.adapters.reference import ReferenceAdapter
class Broken(ReferenceAdapter):
    name = "broken"
    def __init__(self, model, *, optimizer, config):
        raise ValueError(f"no support for {model.in_proj.in_features} features")
"""


DIFFERENT = """
from shardproof.testing import world
@world(2)
def test_case(rank):
    {first}
    rank.record.add_trace([f"forward   all_gather  float32  {{4 + rank.index}} B  ranks 0-1  layers.0"])
"""


@pytest.mark.parametrize(("first", "fails"), [("pass", True), ("rank.expect_different_collectives()", False)])
def test_a_case_fails_whose_ranks_issued_different_collectives(run, first, fails):
    """Also if it compares nothing itself."""
    result = run(DIFFERENT.format(first=first), "--device", "cpu")
    result.assert_outcomes(passed=not fails, failed=int(fails))
    if fails:
        result.stdout.fnmatch_lines(
            [
                "fail: collectives differ between ranks: collective 0 on ranks 0-1 differs: rank 0 issued [[]forward "
                "all_gather float32 4 B ranks 0-1 layers.0], rank 1 issued [[]forward all_gather float32 5 B ranks *"
            ]
        )
