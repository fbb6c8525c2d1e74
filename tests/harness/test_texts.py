"""Texts of failures: bounded, and compared without what differs between ranks and cases that fail alike."""

from __future__ import annotations

import types

import pytest

from shardproof.harness.plugin.records import ALIKE
from shardproof.harness.plugin.terminal import end_with_command, first_of_each_kind, kind_of_text
from shardproof.harness.verdicts.texts import bounded, gist, ranks_of, without_rank


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
        (
            "rank 1 of 2:\nthe rank's process ended: exit code 7\nmore",
            "rank 1 of 2: the rank's process ended: exit code 7",
        ),
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
    assert shared != kind_of_text(
        TRACEBACK.format(line=1, function="test_x", dim=3).replace("Value", "Type"), "test_a.py"
    )


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
    explained = [
        report_of(
            number, "", failure={"text": f"title: it differs\nfirst: {name}"}, explanation={"text": f"first: {name}"}
        )
        for number, name in ((1, "layers.0"), (2, "head"))
    ]
    assert len(first_of_each_kind(explained, width=80)) == 1


def test_a_failure_ends_with_its_command_below_what_ranks_printed():
    made = types.SimpleNamespace(failed=True, longrepr="fail: text\nreproduce: c", sections=[("output of rank 0", "x")])
    end_with_command(made, "c")
    assert made.longrepr == "fail: text\nreproduce: c", "not twice"
    assert made.sections[-1] == ("reproduce", "c")
    silent = types.SimpleNamespace(failed=True, longrepr="[XPASS(strict)]", sections=[])
    end_with_command(silent, "c")
    assert (silent.longrepr, silent.sections) == ("[XPASS(strict)]\nreproduce: c", [])
