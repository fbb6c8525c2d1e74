"""`shardproof gate`: each way in which a run is worse than an earlier one, and each refusal."""

import json

import pytest
from expecttest import assert_expected_inline

from shardproof.commands.gate import gate
from tests.reports import samples

FAILURE = samples.failure("Traceback\n  File x\nValueError: no | way")
TRACE = ["forward all_gather float32 100 B ranks 0-1 a", "backward reduce_scatter float32 100 B ranks 0-1 a"]


def of(id="a", implementation="ours", **more):
    nodeid = f"suites/test_x.py::test_{id}[{implementation}-w2]"
    return samples.case(**{"id": id, "implementation": implementation, "nodeid": nodeid, **more})


def traced(*lines, ranks=(0, 1)):
    return {"collectives": [{"ranks": list(ranks), "trace": list(lines)}]}


@pytest.fixture
def run(tmp_path, capsys):
    """Compare two run files of these cases; returns the exit code and what was printed."""

    def run(before, after, *options, base=None, head=None):
        for name, cases, changes in (("base", before, base or {}), ("head", after, head or {})):
            data = samples.journal(*cases) | {"run_id": {"base": "b", "head": "d"}[name] * 32}
            others = ("effort", "left_out", "end", "merged")
            top = {key: value for key, value in changes.items() if key in data or key in others}
            names = {case["implementation"]: {"version": "", "capabilities": []} for case in cases}
            data["environment"] |= {"implementations": names}
            data["environment"] |= {key: value for key, value in changes.items() if key not in top}
            data |= top
            for key in [key for key, value in changes.items() if value is None]:
                del (data if key in data else data["environment"])[key]
            (tmp_path / f"{name}.json").write_text(json.dumps(data))
        code = gate([str(tmp_path / "base.json"), str(tmp_path / "head.json"), *options])
        captured = capsys.readouterr()
        return code, (captured.out if code < 2 else captured.err).replace(str(tmp_path), "DIR")

    return run


def worse(result):
    """What got worse by a code and a text, one line each, without the rest."""
    code, printed = result
    assert code == 1
    begins = ("  ours ", "  ours:", "  theirs", "    more ")
    lines = [line for line in printed.splitlines() if line.startswith(begins)]
    return [line.strip() for line in lines if "BASE:" not in line]


def test_nothing_got_worse(run):
    code, printed = run([of(), of("b", verdict="unmet")], [of(), of("b")])
    assert code == 0
    assert_expected_inline(
        printed,
        """\
BASE DIR/base.json: 2026-01-02T03:04:05+00:00, torch 2.11.0+cu130 (70d970d), shardproof c0ffeec, suites 0a1b2c3d4e5f
HEAD DIR/head.json: 2026-01-02T03:04:05+00:00, torch 2.11.0+cu130 (70d970d), shardproof c0ffeec, suites 0a1b2c3d4e5f

not compared (2):
  peak memory of 1 case: neither run measured it (docs/gate.md)
  time: no --time-ratio was given

nothing got worse; compared: 1 case that ran in both
""",
    )


FAILED, CRASHED = (of(verdict=verdict, failure=FAILURE) for verdict in ("fail", "crash"))
EXPECTED = of(verdict="expected-fail", expected="fail: the norm (F-2)", failure=FAILURE)
UNSUPPORTED = of(verdict="unsupported", missing=["tied"])
ELSEWHERE = of(implementation="theirs", verdict="unsupported", missing=["tied"])
ANOTHER = traced(TRACE[0], TRACE[1].replace("100", "101"), ranks=[1])


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ([of()], [FAILED], ["ours a: fail, was pass: ValueError: no | way"]),
        (
            [of()],
            [of(verdict="unexpected-pass")],
            ["ours a: unexpected-pass, was pass: passed; the expected failure did not happen"],
        ),
        (
            [of(verdict="expected-fail", expected="fail: the norm (F-2)", failure=FAILURE)],
            [of(verdict="unexpected-pass", failure={"text": "passed, but x.toml entry 1 expects fail: the norm"})],
            ["ours a: unexpected-pass, was expected-fail: passed, but x.toml entry 1 expects fail: the norm"],
        ),
        ([of()], [of(), of("b", verdict="hang", failure=FAILURE)], ["ours b: hang, is new: ValueError: no | way"]),
        ([UNSUPPORTED, of("b")], [CRASHED, of("b")], ["ours a: crash, was unsupported: ValueError: no | way"]),
        ([FAILED], [CRASHED], ["ours a: crash, was fail: ValueError: no | way"]),
        ([of()], [EXPECTED], ["ours a: passed before; fail: the norm (F-2)"]),
        ([of(), of("b")], [of("b")], ["ours a: was pass, and is not in HEAD"]),
        ([of("b"), of()], [of("b"), UNSUPPORTED], ["ours a: unsupported, was pass; missing: tied"]),
        ([of(), ELSEWHERE], [of(), ELSEWHERE], ["theirs: no case ran: all of its cases are skipped"]),
        ([of(), of(implementation="theirs")], [of()], ["theirs: no case ran: HEAD does not have it"]),
        (
            [of(**traced(*TRACE))],
            [of(**traced(*TRACE, TRACE[0].replace("100", "28")))],
            [
                "ours a: rank 0 and 1 other rank: 2 all_gather, 1 before",
                "more bytes: rank 0 and 1 other rank (bytes): 128 all_gather, 100 before",
            ],
        ),
        (
            [of(**traced(*TRACE))],
            [of(collectives=[*traced(*TRACE, ranks=[0])["collectives"], *ANOTHER["collectives"]])],
            ["ours a: rank 1 (bytes): 101 reduce_scatter, 100 before"],
        ),
    ],
    ids=[
        *(
            "failure",
            "unexpected-pass",
            "mended",
            "new-and-fails",
            "asked-now",
            "graver",
            "known-failure",
            "vanished",
            "skipped",
        ),
        *("nothing-runs", "implementation-gone", "more-collectives-and-bytes", "more-bytes-on-one-rank"),
    ],
)
def test_what_got_worse_is_named(run, before, after, lines):
    assert worse(run(before, after, "--more-skips", "1")) == lines


def test_an_unexpected_pass_is_no_new_failure(run):
    _, printed = run([EXPECTED], [of(verdict="unexpected-pass")])
    assert "unexpected pass (1):\n  ours a: unexpected-pass, was expected-fail: passed; " in printed
    assert printed.endswith("WORSE: unexpected pass 1; compared: 1 case that ran in both\n")


def test_a_case_that_failed_and_fails_is_not_worse(run):
    assert run([FAILED], [FAILED])[0] == 0


def test_an_expected_failure_that_fails_otherwise_is_shown(run):
    other = EXPECTED | {"failure": samples.failure("Traceback\n  File x\nValueError: twice the gradient")}
    code, printed = run([of("b"), EXPECTED], [of("b"), other])
    assert code == 0
    assert (
        "expected failures that fail otherwise than before (1):\n  ours a: ValueError: twice the gradient; was: Val"
        in printed
    )
    assert printed.endswith("compared: 2 cases that ran in both, 1 of which is expected to fail in both\n")
    assert "expected failures that fail" not in run([EXPECTED], [EXPECTED])[1]


def test_a_file_of_which_one_run_has_no_case_is_named(run):
    before, after = (
        [of("suites/test_a.py::test_a[w2]"), of("suites/test_b.py::test_b[w2]")],
        [of("suites/test_c.py::test_c")],
    )
    _, printed = run(before, [before[0], *after])
    assert "  HEAD ran nothing of suites/test_b.py: give both runs the same arguments\n" in printed
    assert "  BASE ran nothing of suites/test_c.py: give both runs the same arguments\n" in printed


def test_a_later_base_may_be_swapped(run):
    _, printed = run([of()], [of()], base={"started": "2026-03-01T00:00:00+00:00"})
    assert "BASE started after HEAD: are the two files swapped?" in printed


def test_a_case_that_pytest_skips_now(run):
    left_out = [{"id": "b", "implementation": "ours", "reason": "by hand"}]
    selected = {"ours": ["a", "b"]}
    assert worse(run([of(), of("b")], [of()], head={"left_out": left_out, "selected": selected})) == [
        "ours b: skipped by pytest, was pass: by hand"
    ]


def test_skips_have_a_budget(run):
    before, after = [of()], [of(), of("b", verdict="unmet", missing=["streams"])]
    assert worse(run(before, after)) == ["ours: unsupported or unmet: 1 case, 0 before; --more-skips 1 allows it"]
    assert run(before, after, "--more-skips", "1")[0] == 0


def test_fewer_and_other_collectives_are_not_worse(run):
    assert run([of(**traced(*TRACE))], [of(**traced(*reversed(TRACE)))])[0] == 0
    assert run([of(**traced(*TRACE))], [of(**traced(TRACE[1]))])[0] == 0


def test_what_was_not_measured_is_not_compared(run):
    shortened = of("b", shortened=["collectives"])
    failed = of("c", verdict="fail", failure=FAILURE)
    before = [of(**traced(*TRACE)), of("b", **traced(*TRACE)), failed]
    code, printed = run(before, [of(), shortened, failed, of("d")])
    assert code == 0
    lines = printed.splitlines()
    assert lines[4:8] == [
        "  ours: not in BASE: 1 case",
        "  collectives and bytes of 1 case: HEAD did not record them",
        "  collectives and bytes of 1 case: too many for the record in HEAD",
        "  collectives, bytes and peak memory of 1 case: they do not pass in BASE",
    ]


def test_more_memory(run):
    code, printed = run([of(peak_bytes=[100, 100])], [of(peak_bytes=[101, 103])])
    assert worse((code, printed)) == ["ours a: rank 1 and 1 other rank: 103 bytes are held at a time, 100 before"]
    assert "peak memory" not in printed
    assert run([of(peak_bytes=[100, 100])], [of(peak_bytes=[100, 99])])[0] == 0


@pytest.fixture
def added(run):
    """Compare two runs, of which the later issues a collective more in six cases and fails in three."""

    def added(*options):
        ids = [f"suites/test_x.py::{name}[w2-{number}]" for name in "ab" for number in range(3)]
        extra = ["step all_reduce float32 4 B ranks 0-1"]
        cases = [of(id, **traced(*TRACE * (1 + number))) for number, id in enumerate(ids)]
        more = [of(id, **traced(*TRACE * (1 + number), *extra * number or extra)) for number, id in enumerate(ids)]
        broken = [of(f"c[w2-{name}]") for name in "xyz"]
        texts = ["gradient of 'x' on rank 0\n  it is 2 times", "gradient of 'y' on rank 1\n  it is 4 times", "the loss"]
        fails = [
            case | {"verdict": "fail", "failure": samples.failure(text)}
            for case, text in zip(broken, texts, strict=True)
        ]
        return run([*cases, *broken], [*more, *fails], *options)

    return added


def test_what_has_one_cause_is_one_group(added):
    code, printed = added()
    assert code == 1
    assert_expected_inline(
        printed.partition("\n\n")[2],
        """\
new failure (3):
  ours: 2 cases alike (only numbers and names differ), the first: fail, was pass: gradient of 'x' on rank 0
    c [w2-x] [w2-y]
    reproduce: python -m pytest "suites/test_x.py::test_c[w2-x][ours-w2]" --impl ours --device cpu
  ours c[w2-z]: fail, was pass: the loss
    reproduce: python -m pytest "suites/test_x.py::test_c[w2-z][ours-w2]" --impl ours --device cpu

more collectives (6), more bytes (6):
  ours: 6 cases alike (only numbers and names differ), the first: rank 0 and 1 other rank: 1 all_reduce, 0 before
    more bytes: rank 0 and 1 other rank (bytes): 4 all_reduce, 0 before
    suites/test_x.py::a [w2-0] [w2-1] [w2-2]
    suites/test_x.py::b [w2-0] [w2-1] [w2-2]

not compared (3):
  collectives, bytes and peak memory of 3 cases: they do not pass in HEAD
  peak memory of 6 cases: neither run measured it (docs/gate.md)
  time: no --time-ratio was given

WORSE: new failure 3, more collectives 6, more bytes 6 in 3 groups; compared: 9 cases that ran in both
""",
    )


def test_every_regression_with_verbose(added):
    _, printed = added("--verbose")
    assert printed.count(" 2 all_reduce, 0 before") == 1 and printed.count("(bytes): ") == 6
    assert printed.endswith(
        "WORSE: new failure 3, more collectives 6, more bytes 6; compared: 9 cases that ran in both\n"
    )


def test_groups_in_each_format(added):
    _, printed = added("--format", "github")
    title = "title=more collectives%3A ours suites/test_x.py%3A%3Aa[w2-0] and 5 more cases alike::"
    assert title in printed and printed.count("::error") == 3
    _, printed = added("--format", "markdown")
    row = "| more collectives; more bytes | `ours` | 6 cases, the first `suites/test_x.py::a[w2-0]` | rank 0 and 1"
    assert row in printed
    listed = "<summary>more collectives: 6 cases of ours, the first suites/test_x.py::a[w2-0]</summary>"
    assert listed in printed and "suites/test_x.py::b [w2-0] [w2-1] [w2-2]" in printed


def test_other_collectives_and_other_implementations_are_other_groups(run):
    before = [of(name, implementation, **traced(*TRACE)) for implementation in ("ours", "theirs") for name in "abc"]
    extra = {"a": "step all_reduce float32 4 B ranks 0-1", "b": "clip all_reduce float32 4 B ranks 0-1"}
    after = [
        of(name, implementation, **traced(*TRACE, *filter(None, [extra.get(name)])))
        for implementation in ("ours", "theirs")
        for name in "abc"
    ]
    assert [line.partition(":")[0] for line in worse(run(before, after)) if not line.startswith("more")] == [
        "ours a",
        "ours b",
        "theirs a",
        "theirs b",
    ]


def test_memory_that_one_run_did_not_measure(run):
    code, printed = run([of(peak_bytes=[100, 100])], [of()])
    assert code == 0
    assert "  peak memory of 1 case: HEAD did not measure it" in printed


ACCEPTED = """
[[accept]]
implementation = "ours"
case = "suites/test_x.py::test_a[w2-*]"
kind = "more bytes"
reason = "units are padded to whole rows"
"""


@pytest.fixture
def accepts(run, tmp_path):
    """Compare two runs, of which the later sends more bytes in two cases, with a file of what is accepted."""

    def accepts(text, *options):
        def cases(nbytes):
            ids = ("suites/test_x.py::test_a[w2-x]", "suites/test_x.py::test_ab[w2-x]")
            return [of(id, **traced(TRACE[0].replace("100", nbytes))) for id in ids]

        path = tmp_path / "accepted.toml"
        path.write_text(text)
        return run(cases("100"), cases("101"), "--accept", str(path), *options)

    return accepts


def test_what_is_accepted_is_listed_and_not_worse(accepts):
    code, printed = accepts(ACCEPTED.replace("test_a[", "test_a*["))
    assert code == 0
    lines = printed.splitlines()
    told = "rank 0 and 1 other rank (bytes): 101 all_gather, 100 before (units are padded to whole rows)"
    alike = "2 cases alike (only numbers and names differ), the first"
    assert lines[3:5] == ["accepted (1):", f"  more bytes: ours: {alike}: {told}"]
    assert lines[-1] == "nothing got worse; accepted: 2; compared: 2 cases that ran in both"


def test_what_is_not_accepted_stays_worse(accepts):
    code, printed = accepts(ACCEPTED)
    assert "accepted (1):" in printed
    assert [line.partition(":")[2] for line in worse((code, printed)) if "test_ab" in line], "brackets match themselves"


def test_what_is_accepted_shows_in_each_format(accepts):
    _, printed = accepts(ACCEPTED, "--format", "markdown")
    assert "<details><summary>Accepted (1)</summary>" in printed
    _, printed = accepts(ACCEPTED, "--format", "github")
    assert "::notice title=shardproof accepted::more bytes: ours suites/test_x.py::test_a[w2-x]: " in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            ACCEPTED.replace("_a[", "_c["),
            "entry 1: no 'more bytes' of ours suites/test_x.py::test_c[w2-*] in this comp",
        ),
        (
            ACCEPTED.replace('"ours"', '"theirs"'),
            "entry 1: no 'more bytes' of theirs suites/test_x.py::test_a[w2-*] in",
        ),
        (ACCEPTED.replace("more bytes", "more collectives"), "entry 1: no 'more collectives' of ours suites/test_x.py"),
        (ACCEPTED.replace("more bytes", "more"), "entry 1: kind 'more' is not one of new failure, graver failure, "),
        (ACCEPTED.replace("more bytes", "slower"), "entry 1: 'slower' needs no case, since it concerns the "),
        (ACCEPTED.replace("case =", "# case ="), "entry 1: 'more bytes' needs a pattern of cases"),
        (ACCEPTED.replace("units are padded to whole rows", " "), "entry 1: reason must be a text that is not empty"),
        (ACCEPTED + "until = 3\n", "entry 1: unknown field 'until'; known are implementation, case, kind, reason"),
        ("accept = 3", "expected entries [[accept]] and nothing else, not accept"),
        ("accept = [3]", "entry 1: expected a table"),
        ("[[accept]", "not a TOML file: Expected ']]' at the end of an array declaration"),
    ],
)
def test_a_file_of_what_is_accepted_that_is_refused(accepts, text, message):
    code, printed = accepts(text)
    assert code == 2
    assert printed.startswith(f"shardproof: DIR/accepted.toml: {message}")
    assert printed.count("\n") == 1


def test_an_empty_file_accepts_nothing(accepts):
    code, printed = accepts("")
    assert code == 1 and "more bytes" in printed


def test_a_file_of_what_is_accepted_that_is_not_there(run, tmp_path):
    code, printed = run([of()], [of()], "--accept", str(tmp_path / "none.toml"))
    assert (code, printed) == (2, "shardproof: DIR/none.toml: No such file or directory\n")


def test_what_concerns_an_implementation_is_accepted_without_a_case(run, tmp_path):
    path = tmp_path / "accepted.toml"
    path.write_text('[[accept]]\nimplementation = "ours"\nkind = "more skips"\nreason = "streams"\n')
    after = [of(), of("b", verdict="unmet", missing=["streams"])]
    assert run([of()], after, "--accept", str(path))[0] == 0


def test_time_is_compared_where_a_ratio_is_given(run):
    before, after = [of(seconds=1.0), of("b", seconds=1.0)], [of(seconds=1.0), of("b", seconds=2.2)]
    assert run(before, after)[0] == 0
    assert run(before, after, "--time-ratio", "2")[0] == 0
    assert worse(run(before, after, "--time-ratio", "1.5")) == [
        "ours: 3.2 s instead of 2.0 s for 2 cases; the ratio allowed is 1.5"
    ]


@pytest.mark.parametrize("verdict", ["fail", "expected-fail"])
def test_what_passes_now_is_told(run, verdict):
    code, printed = run([of(verdict=verdict, failure=FAILURE)], [of()])
    assert code == 0
    assert f"  ours a passes, was {verdict}" in printed


@pytest.mark.parametrize(
    ("head", "option", "message"),
    [
        ({"device": "cpu"}, "device", "device cuda, HEAD cpu"),
        ({"torch": "2.13.0"}, "torch", "torch 2.11.0, HEAD 2.13.0"),
        ({"effort": {"name": "quick", "deselected": {}}}, "effort", "effort full, HEAD quick"),
    ],
    ids=["device", "torch", "effort"],
)
def test_other_conditions_are_refused_unless_allowed(run, head, option, message):
    line = f"BASE has {message}; --allow {option} compares them anyway"
    assert run([of()], [of()], head=head) == (2, f"shardproof: {line}\n")
    code, printed = run([of()], [of()], "--allow", option, head=head)
    assert code == 0 and printed.endswith("did not run\n") == (option == "effort"), "of quick the last line says so"


def test_another_build_of_the_same_torch_is_compared(run):
    assert run([of()], [of()], head={"torch": "2.11.0"})[0] == 0


def test_a_run_is_not_compared_with_itself(run):
    code, message = run([of()], [of()], head={"run_id": "b" * 32})
    same = "BASE and HEAD are the same run, started 2026-01-02T03:04:05+00:00; no run is compared with itself"
    assert (code, message) == (2, f"shardproof: {same}\n")


def test_merged_runs_share_none(run):
    environments = [samples.whole_environment() | {"started": f"day {day}"} for day in (1, 2, 3)]
    whole = {"file": "x.json", "end": samples.journal()["end"]}
    parts = [whole | {"run_id": f"{i}" * 32, "environment": one} for i, one in enumerate(environments)]
    code, message = run([of()], [of()], base={"merged": parts[:2]}, head={"merged": parts[1:]})
    shared = "BASE and HEAD have a run in common, started day 2; no run is compared with itself"
    assert (code, message) == (2, f"shardproof: {shared}\n")
    assert run([of()], [of()], base={"merged": parts[:2]}, head={"merged": parts[2:]})[0] == 0
    assert run([of()], [of()], base={"merged": parts[:2]}, head={"run_id": "1" * 32})[0] == 2


def test_the_two_runs_are_described(run):
    head = {"started": "now", "shardproof_commit": f"{'b0a7' * 10}-dirty", "torch_git_version": "unknown"}
    _, printed = run([of()], [of()], head=head | {"suites": "f" * 12})
    assert_expected_inline(
        "\n".join(printed.splitlines()[:4]),
        """\
BASE DIR/base.json: 2026-01-02T03:04:05+00:00, torch 2.11.0+cu130 (70d970d), shardproof c0ffeec, suites 0a1b2c3d4e5f
HEAD DIR/head.json: now, torch 2.11.0+cu130, shardproof b0a7b0a-dirty, suites ffffffffffff
the suites differ: cases may have changed
""",
    )
    _, printed = run([of()], [of()], head=head)
    assert "suites differ" not in printed


def test_a_run_of_an_earlier_version_is_described_without_what_it_lacks(run):
    _, printed = run([of()], [of()], base=dict.fromkeys(("suites", "shardproof_commit", "torch_git_version")))
    line = "BASE DIR/base.json: 2026-01-02T03:04:05+00:00, torch 2.11.0+cu130, shardproof 0.1.0"
    assert printed.splitlines()[0] == line
    assert "suites differ" not in printed, "that is not known"


def test_an_incomplete_run_is_refused(run):
    end = {"complete": False, "reason": "Ctrl-C", "exit_code": 2, "seconds": 1.0}
    code, message = run([of()], [of()], base={"end": end})
    assert (code, message) == (2, "shardproof: BASE is incomplete (Ctrl-C); run it again to its end\n")


def test_a_file_that_cannot_be_read(capsys, tmp_path):
    assert gate([str(tmp_path / "none.json"), str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.startswith("shardproof: ")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--more-skips", "-1", "'-1' is not a number of cases"), ("--time-ratio", "0", "'0' is not a number above 0"),
     ("--time-ratio", "nan", "'nan' is not a number above 0"), ("--allow", "luck", "invalid choice: 'luck'")],
)  # fmt: skip
def test_bad_options(capsys, option, value, message):
    with pytest.raises(SystemExit) as exit:
        gate(["base", "head", f"{option}={value}"])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_markdown(run):
    before = [of(), of("b"), of("c", verdict="fail", failure=FAILURE)]
    failure = FAILURE | {"text": "RuntimeError: <b> a | b"}
    after = [of(verdict="fail", failure=failure, reproduce="pytest a"), of("c")]
    code, printed = run(before, after, "--format", "markdown")
    assert code == 1
    assert_expected_inline(
        printed,
        """\
### shardproof: WORSE: new failure 1, vanished 1; compared: 2 cases that ran in both

- BASE DIR/base.json: 2026-01-02T03:04:05+00:00, torch 2.11.0+cu130 (70d970d), shardproof c0ffeec, suites 0a1b2c3d4e5f
- HEAD DIR/head.json: 2026-01-02T03:04:05+00:00, torch 2.11.0+cu130 (70d970d), shardproof c0ffeec, suites 0a1b2c3d4e5f

| what got worse | implementation | case | |
|---|---|---|---|
| new failure | `ours` | `a` | fail, was pass: RuntimeError: &lt;b&gt; a \\| b |
| vanished | `ours` | `b` | was pass, and is not in HEAD |

<details><summary>Reproduce</summary>

```
pytest a
```

</details>

<details><summary>Better (1)</summary>

- ours c passes, was fail

</details>

<details><summary>Not compared (3)</summary>

- collectives, bytes and peak memory of 1 case: they do not pass in BASE
- collectives, bytes and peak memory of 1 case: they do not pass in HEAD
- time: no --time-ratio was given

</details>
""",
    )


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """The folder in which GitHub checks out the user's repository; none of shardproof's own files is in it."""
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    return tmp_path


def test_annotations_of_github(run, workspace):
    failure = FAILURE | {"text": "RuntimeError: 100%, really"}
    code, printed = run([of()], [of(verdict="fail", failure=failure)], "--format", "github")
    assert code == 1
    assert_expected_inline(
        printed,
        """\
BASE DIR/base.json: 2026-01-02T03:04:05+00:00, torch 2.11.0+cu130 (70d970d), shardproof c0ffeec, suites 0a1b2c3d4e5f
HEAD DIR/head.json: 2026-01-02T03:04:05+00:00, torch 2.11.0+cu130 (70d970d), shardproof c0ffeec, suites 0a1b2c3d4e5f
::error title=new failure%3A ours a::fail, was pass: RuntimeError: 100%25, really
::notice title=shardproof not compared::collectives, bytes and peak memory of 1 case: they do not pass in HEAD
::notice title=shardproof not compared::time: no --time-ratio was given
WORSE: new failure 1; compared: 1 case that ran in both
""",
    )


@pytest.mark.parametrize(("file", "has_place"), [("suites/test_x.py", True), ("test_x.py", False), ("../x.py", False)])
def test_an_annotation_names_a_file_only_if_the_repository_has_it(run, workspace, file, has_place):
    (workspace / "suites").mkdir()
    (workspace / "suites" / "test_x.py").touch()
    (workspace.parent / "x.py").touch()
    failing = of(verdict="fail", failure=FAILURE, nodeid=f"{file}::test_a[ours-w2]")
    _, printed = run([of()], [failing], "--format", "github")
    assert f"::error {f'file={file},' if has_place else ''}title=new failure" in printed


def test_colour_is_for_text_alone(run, monkeypatch):
    plain = {name: run([of()], [FAILED], "--format", name)[1] for name in ("text", "github")}
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = {name: run([of()], [FAILED], "--format", name)[1] for name in plain}
    assert coloured["github"] == plain["github"]
    shown = plain["text"].replace("\nWORSE", "\n\x1b[31mWORSE\x1b[0m")
    assert coloured["text"] == shown.replace("new failure (1):", "\x1b[31mnew failure (1):\x1b[0m")
    _, better = run([FAILED], [of()])
    assert "\x1b[32mbetter (1):\x1b[0m" in better and "\x1b[32mnothing got worse\x1b[0m;" in better
