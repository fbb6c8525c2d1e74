"""The rendered matrix. `EXPECTTEST_ACCEPT=1` rewrites what is expected here."""

import pytest
from expecttest import assert_expected_inline

from shardproof.reports.matrix import gates, render_summary
from shardproof.runfile import Verdict, parse_run
from tests.reports import samples


def summary(*cases, by_case=False, full=False, **environment):
    return render_summary(parse_run(samples.run(*cases, **environment)), by_case=by_case, full=full)


def mixed_cases():
    """Two requirements on three implementations, with a failure and both kinds of skip."""
    one, two, clip = "suites/a.py::test_one[w2]", "suites/a.py::test_two[w4]", "suites/b.py::test_clip[w2]"
    fails = {"verdict": "fail", "failure": samples.whole_case()["failure"] | {"text": "first line\nsecond line"}}
    needs = {"verdict": "unsupported", "missing": ["reshard_after_forward"]}
    few = {"verdict": "unmet", "missing": ["4 GPUs"], "world": 4}
    return [
        samples.case(id=one),
        samples.case(id=one, implementation="torch.fully_shard"),
        samples.case(id=one, implementation="torch.fsdp", **needs),
        samples.case(id=two, **few),
        samples.case(id=two, implementation="torch.fully_shard", **few),
        samples.case(id=two, implementation="torch.fsdp", **needs),
        samples.case(id=clip, requirement="CLIP-1"),
        samples.case(id=clip, requirement="CLIP-1", implementation="torch.fully_shard", **fails),
    ]


def test_requirements_down_and_implementations_across():
    assert_expected_inline(
        summary(*mixed_cases(), **samples.whole_environment()),
        """\
shardproof 0.1.0 (c0ffeec), torch 2.11.0+cu130 (70d970d), Python 3.12.3, NCCL 2.28.9, cuda, 64 cores, 4 x GPU X
2026-01-02T03:04:05+00:00

fail: torch.fully_shard suites/b.py::test_clip[w2] (CLIP-1)
  gradient, second step (step 1), rank 0, head0.weight, element [3, 4]
    first line
    second line

reference: 1 of 3 cases skipped; what they lack:
  1 unmet: 4 GPUs (all for lack of this alone)

torch.fully_shard: 1 of 3 cases skipped; what they lack:
  1 unmet: 4 GPUs (all for lack of this alone)

torch.fsdp: 2 of 2 cases skipped; what they lack:
  2 unsupported: reshard_after_forward (all for lack of this alone)

requirement  cases  reference        torch.fully_shard        torch.fsdp
AUTOGRAD-1   2      1 unmet, 1 pass  1 unmet, 1 pass          2 unsupported
CLIP-1       1      1 pass           1 fail                   -
all          3      1 unmet, 2 pass  1 fail, 1 unmet, 1 pass  2 unsupported

1 of 4 cases that ran failed; 4 skipped
""",
    )


def test_a_row_for_each_case_on_request():
    by_requirement, by_case = summary(*mixed_cases()), summary(*mixed_cases(), by_case=True)
    assert by_case.partition("case   ")[0] == by_requirement.partition("requirement  cases")[0]
    assert_expected_inline(
        by_case[by_case.index("case   ") :],
        """\
case                        requirement  reference        torch.fully_shard        torch.fsdp
suites/a.py::test_one[w2]   AUTOGRAD-1   pass             pass                     unsupported
suites/a.py::test_two[w4]   AUTOGRAD-1   unmet            unmet                    unsupported
suites/b.py::test_clip[w2]  CLIP-1       pass             fail                     -
all                         3            1 unmet, 2 pass  1 fail, 1 unmet, 1 pass  2 unsupported

1 of 4 cases that ran failed; 4 skipped
""",
    )


def test_every_failing_verdict_is_listed_and_no_other():
    cases = [samples.case(id=f"case-of-{verdict}", verdict=verdict, missing=["thing"]) for verdict in Verdict]
    listed = [line for line in summary(*cases).splitlines() if "reference case-of-" in line]
    assert [line.split(":")[0] for line in listed] == ["harness-error", "crash", "fail", "hang", "unexpected-pass"]


def failed(name, text, **more):
    return samples.case(id=name, verdict="fail", failure={"text": text}, **more)


def test_failures_that_are_alike_are_shown_once():
    cases = [
        failed("a", "gradient of 'x' on rank 0 element [1, 2]\n  sharded 1.5e-07"),
        failed("b", "gradient of 'y.z' on rank 1 element [3]\n  sharded -2"),
        failed("c", "gradient of 'x' on rank 0 element [1, 2]\n  sharded 1", implementation="torch.fully_shard"),
        failed("d", "loss of 'x' on rank 0\n  sharded 1"),
        failed("e", "every rank of 2:\nTraceback (most recent call last):\n  at 0x12\nassert 1 == 2"),
        failed("f", "every rank of 2:\nTraceback (most recent call last):\n  at 0x34\nassert 1 == 2"),
        failed("g", "every rank of 2:\nTraceback (most recent call last):\n  at 0x34\nassert 1 == 3"),
        failed("h", "gradient of 'y' on rank 1 element [3]\n  sharded -2"),
    ]
    shown = summary(*cases).partition("\n\nrequirement")[0]
    assert [line.split()[2] for line in shown.splitlines() if line.startswith("fail: ")] == ["a", "c", "d", "e", "g"]
    same = "with the same failure (only numbers and names differ); --full shows each:\n"
    assert f"    sharded 1.5e-07\n  2 more cases {same}    b h\n" in shown
    assert f"assert 1 == 2\n  1 more case {same}    f\n" in shown
    whole = summary(*cases, full=True)
    assert [line.split()[2] for line in whole.splitlines() if line.startswith("fail: ")] == list("abcdefgh")


def test_a_failure_says_as_much_as_is_known():
    fails = samples.case(verdict="crash", failure={"text": "killed by signal 9", "rank": 0})
    where = {"verdict": "fail", "id": "x", "nodeid": "x[reference]"}
    bare = samples.case(**where, failure={"text": "no baseline", "step": 0, "element": []})
    silent = samples.case(verdict="unexpected-pass", id="y")
    assert_expected_inline(
        summary(fails, bare, silent),
        """\
crash: reference suites/test_autograd.py::test_unused[w2] (AUTOGRAD-1)
  rank 0
    killed by signal 9

fail: reference x (AUTOGRAD-1)
  first step (step 0), element []
    no baseline
  reproduce: python -m pytest "x[reference]" --impl reference --device cpu

unexpected-pass: reference y (AUTOGRAD-1)
  passed; the expected failure did not happen

requirement  cases  reference
AUTOGRAD-1   3      1 crash, 1 fail, 1 unexpected-pass
all          3      1 crash, 1 fail, 1 unexpected-pass

3 of 3 cases that ran failed; 0 skipped
""",
    )


def test_what_was_expected_is_told_and_what_was_not_is_a_failure():
    """As harness/plugin writes them: a known failure keeps its text, a pass in its place names the entry."""
    known = {"verdict": "expected-fail", "failure": {"text": "no norm", "rank": 3}}
    cases = [
        samples.case(id="a", expected="fail: the norm raises (F-2)", **known),
        samples.case(id="b", expected="fail: the norm raises (F-2)", **known),
        samples.case(id="c", **known),
        samples.case(id="d", verdict="unexpected-pass", failure={"text": "passed, but x.toml entry 1 expects fail: y"}),
        samples.case(id="e", verdict="unmet", missing=["4 GPUs"]),
    ]
    assert_expected_inline(
        summary(*cases),
        """\
unexpected-pass: reference d (AUTOGRAD-1)
    passed, but x.toml entry 1 expects fail: y

expected-fail, (the run file gives no reason): reference 1
expected-fail, fail: the norm raises (F-2): reference 2

reference: 1 of 5 cases skipped; what they lack:
  1 unmet: 4 GPUs (all for lack of this alone)

requirement  cases  reference
AUTOGRAD-1   5      1 unmet, 3 expected-fail, 1 unexpected-pass
all          5      1 unmet, 3 expected-fail, 1 unexpected-pass

1 of 4 cases that ran failed; 1 skipped
""",
    )


def test_requirements_are_in_the_order_of_the_contract():
    """Workers end their cases in any order; requirements that the contract does not have come last."""
    names = ["STATE-1", "MINE-1", "TRAINING-2", "TRAINING-1"]
    lines = summary(*(samples.case(id=name, requirement=name) for name in names)).splitlines()
    shown = [line.partition(" ")[0] for line in lines]
    assert [name for name in shown if name in names] == ["TRAINING-1", "TRAINING-2", "STATE-1", "MINE-1"]


def test_a_case_counts_for_each_of_its_requirements():
    both = samples.case(requirement="TRACE-1, TRACE-2", verdict="fail")
    one = samples.case(id="x", requirement="TRACE-2")
    assert_expected_inline(
        "\n".join(summary(both, one).splitlines()[2:-2]),
        """\
requirement  cases  reference
TRACE-1      1      1 fail
TRACE-2      2      1 fail, 1 pass
all          2      1 fail, 1 pass""",
    )


def test_a_long_text_keeps_its_ends():
    lines = [f"line {i}" for i in range(17)]
    short, long = ("\n".join(lines[:n]) for n in (16, 17))
    case = [samples.case(verdict="fail", failure={"text": text}) for text in (short, long, long + "\nline 17")]
    assert "left out" not in summary(case[0])
    assert "left out" not in summary(case[1])
    shown = summary(case[2])
    assert "    line 5\n    ... 2 lines left out; --full shows them ...\n    line 8\n" in shown
    assert "line 6" not in shown and "line 7" not in shown and "line 17\n" in shown
    assert "left out" not in summary(case[2], full=True) and "    line 6\n    line 7\n" in summary(case[2], full=True)


def test_a_run_without_cases_says_so():
    assert_expected_inline(
        summary(),
        """\
requirement  cases
all          0

0 of 0 cases that ran failed; 0 skipped
""",
    )


@pytest.mark.parametrize("field", ["id", "implementation", "requirement", "nodeid"])
def test_what_would_steer_the_terminal_is_written_out(field):
    text = summary(samples.case(verdict="fail", **{field: "red\x1b[31m\nline"}))
    assert "\x1b" not in text
    assert r"red\x1b[31m\nline" in text


def test_a_failure_text_keeps_its_lines_and_loses_its_colours():
    text = summary(samples.case(verdict="fail", failure={"text": "\x1b[31mone\n\ttwo\r\n\nfour"}))
    assert "    \\x1b[31mone\n            two\n\n    four\n" in text


LEFT_OUT = {"reference": {"suites/test_tied.py": 2, "own.py": 1}, "ddp": {"own.py": 3}}


@pytest.mark.parametrize(
    ("effort", "line"),
    [
        ({"name": "full", "deselected": {}}, "effort full: all cases"),
        ({"name": "quick", "deselected": LEFT_OUT}, "effort quick: 6 of 7 cases left out: tied 2, own 4"),
    ],
)
def test_what_the_effort_left_out_comes_before_the_verdicts(effort, line):
    journal = samples.journal(samples.case()) | {"effort": effort}
    lines = render_summary(parse_run(journal)).splitlines()
    assert lines[2:5] == ["", line, ""]


# What kept implementations from cases


def skips(count, *missing, verdict="unsupported", **more):
    """This many cases that were skipped for the same reason."""
    ids = [f"{verdict}-{'-'.join(missing)}-{i}" for i in range(count)]
    return [samples.case(id=id_, verdict=verdict, missing=list(missing), **more) for id_ in ids]


def shown(*cases, full=False):
    return "\n\n".join("\n".join(block) for block in gates(parse_run(samples.run(*cases)), full=full))


def test_what_is_missing_is_counted_for_each_implementation():
    cases = [
        samples.case(id="ran"),
        *skips(2, "offload"),
        *skips(1, "tied", "offload", "streams"),
        *skips(1, "streams", verdict="unmet"),
        *skips(1, verdict="unmet"),
        *skips(1, "offload", implementation="torch.fsdp"),
        samples.case(id="ran", implementation="ddp"),
    ]
    assert_expected_inline(
        shown(*cases),
        """\
reference: 5 of 6 cases skipped; what they lack:
  3 unsupported: offload (2 for lack of this alone)
  1 unmet: (the run file does not name what is missing) (all for lack of this alone)
  1 unmet: streams (all for lack of this alone)
  1 unsupported: streams
  1 unsupported: tied

torch.fsdp: 1 of 1 case skipped; what they lack:
  1 unsupported: offload (all for lack of this alone)""",
    )


def test_a_capability_that_alone_keeps_it_from_many_is_hinted_at():
    """Hardware is not, which no adapter can declare, nor an interface of torch: one has it on purpose or not at all."""
    cases = [*skips(10, "tied"), *skips(12, "reshard"), *skips(9, "offload"), *skips(30, "offload", "hybrid")]
    cases += [*skips(50, "fsdp1-api"), *skips(40, "streams", verdict="unmet")]
    hint = "  hint: 12 cases lack only reshard, 10 only tied; declare what the implementation has"
    assert shown(*cases).splitlines()[-1] == f"{hint} (docs/adapters.md)"


def test_a_long_list_is_shortened_unless_it_is_asked_for():
    cases = [case for i in range(12) for case in skips(12 - i, f"thing{i:02}", "other")]
    lines = shown(*cases).splitlines()
    assert (lines[1], lines[8]) == ("  78 unsupported: other", "   6 unsupported: thing06")
    assert lines[9:] == ["  5 more, at most 5 cases each; --full lists them"]
    assert shown(*cases, full=True).splitlines()[-1] == "   1 unsupported: thing11"


def test_names_from_a_file_do_not_steer_the_terminal():
    assert "\x1b" not in shown(*skips(11, "red\x1b[31m", implementation="x\x1b[31m"))
