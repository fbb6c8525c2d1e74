"""What a user reads of failures: bounded, once for ranks and cases that fail alike, with what explains them."""

import json
import types
import xml.etree.ElementTree as ElementTree

import pytest

from shardproof.alike import ALIKE, kind_of_text, without_rank
from shardproof.harness.judging.texts import MOST_CHARACTERS, MOST_OF_A_RANK, bounded, gist, ranks_of, readable
from shardproof.harness.plugin.terminal import end_with_command, first_of_each_kind
from tests.harness.inner import CASE

pytestmark = pytest.mark.sampled

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
    waits = "hang: ranks 0-4, 6-7 are in all_reduce sum float32 128 B, collective 4 on ranks 0-7 (group *)"
    told = [f"{waits}, and rank 5 is missing from it"]
    told += ['rank 5 is at File "*test_inner.py", line 11 in test_case, after all_reduce sum float32 64 B', *LAST]
    told += ["ranks 0-4, 6-7 of 8:", '  File "*test_inner.py", line 12 in test_case', "rank 5 of 8:"]
    result.stdout.fnmatch_lines(told)
    assert len(lines_of(result)) <= 40
    assert "forkserver.py" not in result.stdout.str(), "the frames below the case are those of the harness"


def test_a_crash_of_eight_ranks_is_short_and_shows_the_collectives(run):
    result = run(EIGHT.format(body="os.kill(os.getpid(), signal.SIGSEGV)"))
    told = ["crash: rank 5 of 8:", "the rank's process ended: killed by SIGSEGV", "rank* lost the connection to it"]
    told += [*LAST, "*output of rank 5*", "FAILED *crash: rank 5 of 8: the rank's*"]
    result.stdout.fnmatch_lines(told)
    assert len(lines_of(result)) <= 40
    assert "closed by peer" not in result.stdout.str()
    assert "--check-collectives" not in result.stdout.str(), "all ranks announced the same: it would not help"


@pytest.mark.parametrize(
    ("body", "first", "second"),
    [
        ("dist.all_reduce(torch.ones(4), op=MAX if rank.index else SUM)", "all_reduce sum", "all_reduce max"),
        ("dist.broadcast(torch.ones(4), src=rank.index)", "broadcast from rank 0", "broadcast from rank 1"),
        ("dist.reduce(torch.ones(4), dst=rank.index)", "reduce sum to rank 0", "reduce sum to rank 1"),
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
    check_is_stopped(run, body, "forward all_reduce sum", "forward all_reduce max")


RECORDED = "with Recorder(announcer=rank.announcer).during('forward'): "

IMPORTS = """
import torch, torch.distributed as dist, torch.distributed._functional_collectives as functional
from shardproof.harness.collectives.recorder import Recorder
MAX, SUM = dist.ReduceOp.MAX, dist.ReduceOp.SUM
"""


def check_is_stopped(run, body, first, second):
    result = run(IMPORTS + CASE.format(body=body), "--check-collectives", "--deadline", "5")
    told = [f"  rank 0: 1 {first} float32 16 B", f"  rank 1: 1 {second} float32 16 B"]
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
    lines = ["*output of rank 0; ranks 1-2 alike*", "alike on rank 0", "same", "*output of rank 3*"]
    result.stdout.fnmatch_lines(lines)
    assert result.stdout.str().count("same\n") == 1


def test_a_failure_of_a_hundred_megabytes_is_bounded_in_the_rank(run, pytester):
    body = "raise ValueError('begin ' + 'x' * 100_000_000 + f' end of rank {rank.index}')"
    result = run(CASE.format(body=body), "--report", "run.json")
    result.stdout.fnmatch_lines(["*ValueError: begin xxx*", "... 99* characters left out ...", "*xxx end of rank 0"])
    (case,) = json.loads(pytester.path.joinpath("run.json").read_text())["cases"]
    assert MOST_OF_A_RANK - 256 < len(case["failure"]["text"]) < MOST_CHARACTERS  # less the calls before it
    assert len(result.stdout.str()) < 2 * MOST_CHARACTERS


FAIL_ALIKE = """
import pytest
from shardproof.testing import world
from shardproof.harness.judging.finding import Finding, Location
from shardproof.harness.judging.finding import Stage
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
    result = run(FAIL_ALIKE, "--report", "run.json", "--junitxml", "junit.xml", *options, own_process=bool(options))
    result.assert_outcomes(failed=13)
    printed = result.stdout.str()
    assert printed.count("  sharded ") == 2
    result.stdout.fnmatch_lines(
        ["10 more cases with the same failure (only numbers and names differ; -v prints each):"]
    )
    listed = printed[printed.index("10 more cases with") :].partition("\n__")[0].partition("\n==")[0]
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
    assert run(FAIL_ALIKE, "-v").stdout.str().count("  sharded ") == 12


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
        one, other = (f"rank {rank} issued [[]forward all_gather float32 {4 + rank} B ranks 0-1" for rank in range(2))
        told = f"fail: collectives differ between ranks: collective 0 on ranks 0-1 differs: {one} layers.0], {other} *"
        result.stdout.fnmatch_lines([told])


# Texts: bounded, and compared without what differs between ranks and cases that fail alike


def test_a_long_text_loses_its_middle_and_says_how_much():
    assert bounded("short") == "short"
    text = bounded("a" * 100 + "b" * 50 + "c" * 100, most=200)
    assert text == f"{'a' * 100}\n... 50 characters left out ...\n{'c' * 100}"
    assert bounded("odd \ud800") == "odd \\ud800", "a lone surrogate cannot be sent to the controller of an xdist run"


@pytest.mark.parametrize(
    ("ranks", "named"),
    [([3], "rank 3"), ([1, 0], "ranks 0-1"), ([0, 1, 2, 3, 4, 6, 7], "ranks 0-4, 6-7"), ([5, 2, 2], "ranks 2, 5")],
)
def test_ranks_are_named_in_runs(ranks, named):
    assert ranks_of(ranks) == named


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("RuntimeError: rank 0 of 8 failed", "RuntimeError: rank 7 of 8 failed"),
        ("[Rank0]: [pid 123] at 0x7f00ab", "[Rank3]: [pid 4567] at 0x55cd"),
        ("2026-01-02 03:04:05,678 on cuda:0", "2026-01-02 03:04:06,001 on cuda:1"),
        ("Connection closed by peer [127.0.0.1]:14048", "Connection closed by peer [127.0.0.1]:25516"),
    ],
)
def test_ranks_that_fail_alike_have_one_text(first, second):
    assert without_rank(first) == without_rank(second)


def test_other_numbers_are_a_difference_between_ranks():
    assert without_rank("assert 3 == 4") != without_rank("assert 3 == 5")


TRACEBACK = """\
every rank of 2:
Traceback (most recent call last):
  File "/cases/test_a.py", line {line}, in {function}
    pair.step(batch)
  File "/package/adapter.py", line 7, in __init__
    raise ValueError(f"no support for {{dim}}")
ValueError: no support for {dim}
  and a hint
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TRACEBACK.format(line=1, function="test_x", dim=3), "ValueError: no support for 3"),
        ("rank 1 of 2:\nthe rank's process ended: code 7\nmore", "rank 1 of 2: the rank's process ended: code 7"),
        ("the sharded run diverges: x\n  sharded 1", "the sharded run diverges: x"),
        ("", ""),
    ],
)
def test_the_gist_is_the_error_itself(text, line):
    assert gist(text) == line


def test_failures_are_alike_but_for_numbers_names_and_the_frames_of_the_case():
    one = "title: gradient of 'a.w' in the first step (step 0) on rank 0 element [0, 3]\n  sharded 1.5e-07, oracle -2"
    other = "title: gradient of 'b' in the first step (step 0) on rank 1 element [7]\n  sharded 3, oracle 0.25"
    assert kind_of_text(one, "test_a.py") == kind_of_text(other, "test_a.py")
    assert kind_of_text(one, "test_a.py") != kind_of_text(one.replace("gradient", "loss"), "test_a.py")
    assert kind_of_text(one, "test_a.py") != kind_of_text(one.replace("first", "second"), "test_a.py")
    shared = kind_of_text(TRACEBACK.format(line=1, function="test_x", dim=3), "test_a.py")
    assert shared == kind_of_text(TRACEBACK.format(line=50, function="test_y", dim=5), "test_a.py")
    other = TRACEBACK.format(line=1, function="test_x", dim=3).replace("Value", "Type")
    assert shared != kind_of_text(other, "test_a.py")


@pytest.mark.parametrize(
    ("found", "kinds"),
    [
        ("modules: 3 Linear, Tower; often a hook keeps them", "modules"),
        ("modules: GRU", "modules"),
        ("modules: GRU; threads: left 1", "modules, threads"),
    ],
)
def test_leaks_are_alike_whichever_classes_they_list(found, kinds):
    """One hook that keeps a model keeps the classes of whatever model there is."""
    text = f"leak: {found} (on ranks 0-1)\nall else that the case compares is right"
    assert kind_of_text(text, "test_a.py") == f"leak: {kinds}"


def test_an_assertion_of_the_case_itself_is_alike_only_where_it_is_the_same():
    lines = TRACEBACK.splitlines()
    own = "\n".join([*lines[:3], "    assert found == {dim}", "AssertionError: assert 2 == {dim}"])
    first = own.format(line=9, function="test_x", dim=3)
    assert kind_of_text(first, "test_a.py") == kind_of_text(first.replace("of 2", "of 4"), "test_a.py")
    # Whether the addresses of two ranks are equal is chance.
    assert kind_of_text(first, "test_a.py") == kind_of_text(first.replace("of 2", f"of 2{ALIKE}"), "test_a.py")
    for change in ({"dim": 4}, {"line": 10}, {"function": "test_y"}):
        other = own.format(**{"line": 9, "function": "test_x", "dim": 3} | change)
        assert kind_of_text(first, "test_a.py") != kind_of_text(other, "test_a.py")


def report_of(number, longrepr, **record):
    case = {"implementation": "x", "verdict": "fail", "failure": {"text": "title: it differs"}} | record
    return types.SimpleNamespace(nodeid=f"a.py::test[{number}]", longrepr=longrepr, shardproof=case)


def test_what_explains_one_failure_does_not_tell_it_from_others():
    firsts = ["first: layers.0", "first: head"]
    failures = [{"failure": {"text": f"title: it differs\n{one}"}, "explanation": {"text": one}} for one in firsts]
    explained = [report_of(number, "", **fields) for number, fields in enumerate(failures)]
    assert len(first_of_each_kind(explained, width=80)) == 1


def test_a_failure_ends_with_its_command_below_what_ranks_printed():
    made = types.SimpleNamespace(failed=True, longrepr="fail: text\nreproduce: c", sections=[("output of rank 0", "x")])
    end_with_command(made, "c")
    assert made.longrepr == "fail: text\nreproduce: c", "not twice"
    assert made.sections[-1] == ("reproduce", "c")
    silent = types.SimpleNamespace(failed=True, longrepr="[XPASS(strict)]", sections=[])
    end_with_command(silent, "c")
    assert (silent.longrepr, silent.sections) == ("[XPASS(strict)]\nreproduce: c", [])


def traced(message):
    """The text of an exception with this message, whose line of source has the values too."""
    source = f"raise Error([{', '.join('1' * 400)}])"
    return f'Traceback (most recent call last):\n  File "case.py", line 1, in case\n    {source}\nError: {message}\n'


VALUES = {
    "tensor": ("gradient of 'x': tensor([[1., 2.],\n        [3., 4.]]) is not 5",
        "gradient of 'x': tensor([[1., 2.], [3., 4.]]) is not 5"),
    "long": (f"of {list(range(200))} some are in {dict.fromkeys(range(90))}, which is wrong",
        f"of {str(list(range(200)))[:178]} ... {str(list(range(200)))[-59:]} some are in "
        f"{str(dict.fromkeys(range(90)))[:174]} ... {str(dict.fromkeys(range(90)))[-59:]}, which is wrong"),
    "short": ("collectives are ['a    2 B', 'x'], not []", "collectives are ['a    2 B', 'x'], not []"),
    "open": (f"an interval [0, 1) and {'word ' * 20}", f"an interval [0, 1) and {'word ' * 20}"),
    "word": ("x" * 5000, f"{'x' * 933} ... {'x' * 59}"),
    "lines": ("expected\n  [1]\nbut got\n  [2]", "expected\n  [1]\nbut got\n  [2]"),
}  # fmt: skip


@pytest.mark.parametrize(("message", "shown"), VALUES.values(), ids=VALUES)
def test_a_long_value_is_cut_out_of_the_sentence(message, shown):
    """Source lines stay, and so does each exception of a chain."""
    cause = f"{traced(message)}\nThe above exception was the direct cause of the following exception:\n\n"
    assert readable(traced(message)) == traced(shown)
    assert readable(cause + traced(message)) == cause.replace(message, shown) + traced(shown)


def test_brackets_of_a_huge_message_are_read_once():
    assert readable(traced("[" * 300_000)).count("[") < 2000
    assert readable(traced("[]" * 300_000)).count("[") < 2000


def test_a_text_that_is_no_traceback_stays():
    text = f"the sharded run diverges: {list(range(300))}"
    assert readable(text) == text


def test_what_is_said_of_a_value_is_in_the_first_line(run):
    """Also of the rank that failed at the same place with other values."""
    values = "import torch; found = torch.arange(900).view(30, 30) + rank.index"
    result = run(CASE.format(body=f"{values}\n    assert found is None, f'{{found}} is wrong'"))
    ends = (
        "AssertionError: tensor([[][[]  0,*... *, 899]]) is wrong",
        "rank 1 *: tensor([[][[]  1,*... *, 900]]) is wrong",
    )
    result.stdout.fnmatch_lines(ends)
