"""`shardproof expectations`: a draft excuses the failures of its run and no others; --check finds what passes now."""

import json

import pytest
from expecttest import assert_expected_inline

from shardproof import door
from shardproof.commands.expectations import expectations
from shardproof.harness.plugin.known_failures import load_given
from tests.reports import samples

TRACEBACK = 'rank 0 of 2:\nTraceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: a "b" \\ c'
DIVERGES = {"text": "...", "stage": "gradient", "step": 0, "rank": 1, "name": "head.weight", "element": [3]}


def of(id, implementation="theirs", **more):
    return samples.case(id=f"suites/test_x.py::{id}", implementation=implementation, **more)


def failed(id, failure=DIVERGES, verdict="fail"):
    return of(id, verdict=verdict, failure=failure)


@pytest.fixture
def draft(tmp_path, capsys):
    """Draft from a run of these cases; returns the exit code and what was printed."""

    def draft(*cases, options=(), **changes):
        data = samples.journal(*cases) | changes
        names = {case["implementation"]: {"version": "", "capabilities": []} for case in cases}
        data["environment"]["implementations"] = names
        path = tmp_path / "run.json"
        path.write_text(json.dumps(data))
        code = expectations([str(path), *options])
        captured = capsys.readouterr()
        return code, captured.out or captured.err.replace(str(tmp_path), "DIR")

    return draft


def test_what_fails_alike_has_one_entry(draft):
    cases = [
        *(failed(f"test_all[w{size}]") for size in (2, 4)),
        of("test_all[w8]", verdict="unmet", missing=["eight"]),
        failed("test_all_but_one[w2]"),
        of("test_all_but_one[w4]"),
        failed("test_two_ways[w2]", samples.failure(TRACEBACK), "crash"),
        failed("test_two_ways[w4]", samples.failure("the rank did not answer\nits stacks"), "hang"),
        of("test_passes[w2]"),
        of("test_excused[w2]", verdict="expected-fail", expected="fail: known", failure=DIVERGES),
    ]
    code, text = draft(*cases)
    assert code == 0
    assert_expected_inline(
        text,
        """\
# Drafted from a run with torch 2.11.0+cu130 on cuda. Look into each failure
# before it is expected: it may be a defect of the implementation, of its adapter, or of the case.
implementation = "theirs"

[[expect]]
cases = [
    "suites/test_x.py::test_all[*",
    "suites/test_x.py::test_all_but_one[w2]",
]
verdict = "fail"
reason = "gradient of head.weight diverges in step 0 on rank 1"
link = "TODO"

[[expect]]
cases = ["suites/test_x.py::test_two_ways[w2]"]
verdict = "crash"
reason = "torch.OutOfMemoryError: a \\"b\\" \\\\ c"
link = "TODO"

[[expect]]
cases = ["suites/test_x.py::test_two_ways[w4]"]
verdict = "hang"
reason = "the rank did not answer"
link = "TODO"
""",
    )


def test_the_draft_excuses_what_failed_and_nothing_else(draft, tmp_path):
    cases = [failed("test_all[w2-a]"), failed("test_all[w2-b]"), failed("test_other[w2]"), of("test_all_but[w2]")]
    _, text = draft(*cases, failed("test_one[w2]", samples.failure(TRACEBACK)))
    path = tmp_path / "theirs.toml"
    path.write_text(text)
    name, entries = load_given(path)
    assert name == "theirs"
    ids = [case["id"] for case in [*cases, failed("test_one[w2]")]]
    diverges = ["gradient of head.weight diverges in step 0 on rank 1"]
    matched = [[entry.reason for entry in entries if entry.matches(id)] for id in ids]
    assert matched == [diverges, diverges, diverges, [], ['torch.OutOfMemoryError: a "b" \\ c']]


def test_the_reason_is_the_first_divergence_of_an_explained_run(draft):
    told = samples.EXPLANATION
    first = told["first"] | {key: DIVERGES[key] for key in ("step", "rank", "element")}
    first |= {"stage": "gathered parameter", "name": "low.weight"}
    steady = failed("test_a[w2]") | {"explanation": told | {"again": "fail", "first": first}}
    unsteady = failed("test_b[w2]") | {"explanation": told | {"again": "pass", "first": None}}
    _, text = draft(steady, unsteady)
    assert [line for line in text.splitlines() if line.startswith("reason")] == [
        'reason = "first, gathered parameter of low.weight diverges in step 0 on rank 1"',
        'reason = "passed when it ran again: the failure is not steady"',
    ]


def test_one_of_several_implementations(draft):
    code, message = draft(of("test_a[w2]"), of("test_a[w2]", "ours"))
    assert (code, message) == (2, "shardproof: DIR/run.json has theirs, ours: name one with --impl\n")
    code, text = draft(of("test_a[w2]"), of("test_a[w2]", "ours"), options=["--impl", "ours"])
    assert code == 0 and 'implementation = "ours"' in text
    code, message = draft(of("test_a[w2]"), options=["--impl", "ours"])
    assert (code, message) == (2, "shardproof: the run has no case of 'ours'; it has those of theirs\n")


def test_an_incomplete_run_is_refused(draft):
    end = {"complete": False, "reason": "Ctrl-C", "exit_code": 2, "seconds": 1.0}
    code, message = draft(of("test_a[w2]"), end=end)
    assert code == 2
    assert message == "shardproof: DIR/run.json is incomplete (Ctrl-C): more cases may fail than it has\n"


def test_a_failure_without_a_text(draft):
    _, text = draft(failed("test_a[w2]", samples.failure("\n")), of("test_b[w2]", verdict="fail"))
    known = [f"suites/test_x.py::test_{name}[w2]" for name in "ab"]
    assert [(entry["reason"], entry["cases"]) for entry in door.parse_toml(text)["expect"]] == [("no text", known)]


# --check: which known failures pass now, by entry, and how to bound each

COMPLETE = {"complete": True, "reason": "", "exit_code": 1, "seconds": 1.0}


def judged(id, verdict, *, entry=29, implementation="torch.fully_shard", torch="", link="findings/F037.py"):
    """A case that an entry expects to fail: "unexpected-pass" or "expected-fail"."""
    known = {"source": f"torch.fully_shard.toml entry {entry}", "link": link, "torch": torch}
    known["case"] = f"suites/test_x.py::{id.partition('[')[0]}*"
    return of(id, implementation, verdict=verdict, known_failure=known)


@pytest.fixture
def check(tmp_path, capsys):
    """Check run files, given as (version of torch, cases) or (version, cases, what replaces fields)."""

    def check(*runs):
        paths = []
        for number, (torch, cases, *changes) in enumerate(runs):
            data = samples.journal(*cases) | (changes[0] if changes else {})
            data["environment"] |= {"torch": torch}
            paths.append(tmp_path / f"{number}.json")
            paths[-1].write_text(json.dumps(data))
        code = expectations(["--check", *map(str, paths)])
        captured = capsys.readouterr()
        return code, (captured.out + captured.err).replace(str(tmp_path), "DIR")

    return check


def test_nothing_to_do(check):
    cases = [judged("test_a[w2]", "expected-fail"), samples.case()]
    assert check(("2.15.0+cu132", cases)) == (0, "every known failure that ran still fails\n")


def test_entries_that_pass_are_bounded_by_the_oldest_version_with_which_they_pass(check):
    """Entries are told apart by pattern and finding: their numbers are others in runs of other commits."""
    mended = [judged("test_mended[w2]", "unexpected-pass"), judged("test_mended[w4]", "unexpected-pass")]
    before = [judged("test_mended[w2]", "expected-fail", entry=7), judged("test_mended[w4]", "expected-fail", entry=7)]
    lately = [judged("test_lately[w2]", "expected-fail", torch=">=2.12")]
    passes = [judged("test_lately[w2]", "unexpected-pass", torch=">=2.12", implementation="lightning.fabric")]
    runs = ("2.15.0", [*mended, *passes]), ("2.13.0+cpu", [*before, *lately]), ("2.14.1", [*mended, *lately])
    code, text = check(*runs)
    assert code == 1
    assert_expected_inline(
        text,
        """\
torch.fully_shard.toml entry 29, findings/F037.py: suites/test_x.py::test_mended*
  torch.fully_shard: passes with torch 2.14, 2.15; fails with torch 2.13
  bound with torch = "<2.14"
torch.fully_shard.toml entry 29, findings/F037.py: suites/test_x.py::test_lately*
  torch.fully_shard, lightning.fabric: passes with torch 2.15; fails with torch 2.13; fails with torch 2.14
  bound with torch = ">=2.12,<2.15"
""",
    )


def test_one_run_leaves_open_what_older_and_newer_versions_do(check):
    code, text = check(("2.16.0.dev20270101+git", [judged("test_a[w2]", "unexpected-pass")]))
    assert code == 1
    assert_expected_inline(
        text,
        """\
torch.fully_shard.toml entry 29, findings/F037.py: suites/test_x.py::test_a*
  torch.fully_shard: passes with torch 2.16
  bound with torch = "<2.16", or by an older version: no run has one
""",
    )
    _, text = check(("2.14.0", [judged("test_a[w2]", "unexpected-pass")]), ("2.15.0", [samples.case()]))
    line = '  bound with torch = "<2.14", or by an older version: no run has one; no case of it ran with torch 2.15'
    assert text.splitlines()[-1] == line


def test_entries_that_no_bound_fits(check):
    parts = [judged("test_a[w2]", "unexpected-pass"), judged("test_a[w4]", "expected-fail")]
    again = [judged("test_b[w2]", "unexpected-pass")], [judged("test_b[w2]", "expected-fail")]
    code, text = check(("2.14.0", again[0]), ("2.15.0", [*parts, *again[1]]))
    assert code == 1
    assert_expected_inline(
        text,
        """\
torch.fully_shard.toml entry 29, findings/F037.py: suites/test_x.py::test_b*
  torch.fully_shard: passes with torch 2.14; fails with torch 2.15
  no upper bound fits: torch 2.15 is newer than 2.14
torch.fully_shard.toml entry 29, findings/F037.py: suites/test_x.py::test_a*
  torch.fully_shard: with torch 2.15 passes in part: suites/test_x.py::test_a[w2] on torch.fully_shard
  divide the entry: a bound is for all of its cases
""",
    )


def test_patterns_of_an_entry_that_need_different_bounds(check):
    cases = [judged("test_a[w2]", "unexpected-pass"), judged("test_b[w2]", "unexpected-pass")]
    still = [judged("test_a[w2]", "expected-fail"), judged("test_b[w2]", "expected-fail")]
    _, text = check(("2.14.0", still), ("2.15.0", [cases[0], still[1]]))
    assert text.splitlines()[2:] == ['  bound with torch = "<2.15"; divide the entry: its other patterns differ']
    _, text = check(("2.14.0", still), ("2.15.0", cases))
    assert text.splitlines()[2::3] == ['  bound with torch = "<2.15"'] * 2


def test_no_bound_fits_an_entry_that_fails_before_and_again(check):
    failing, passing = [judged("test_a[w2]", "expected-fail")], [judged("test_a[w2]", "unexpected-pass")]
    _, text = check(("2.13.0", failing), ("2.14.0", passing), ("2.15.0", failing))
    assert text.splitlines()[-1] == "  no upper bound fits: torch 2.15 is newer than 2.14"


def test_what_the_run_says_of_entries(check):
    line = "expectations/torch.fully_shard.toml entry 3 matches no case: suites/test_x.py::test_gone*"
    assert check(("2.15.0", [samples.case()], {"end": COMPLETE | {"problems": [line]}})) == (1, f"{line}\n")


def test_a_pass_whose_entry_is_not_in_the_file(check):
    """A file of an older version has the text of the failure alone."""
    failure = samples.whole_case()["failure"] | {"text": "passed, but x.toml entry 1 expects fail: raises"}
    case = samples.case(verdict="unexpected-pass", failure=failure)
    line = f"{case['id']} passes on reference; DIR/0.json names no entry: {failure['text']}\n"
    assert check(("2.15.0", [case])) == (1, line)


@pytest.mark.parametrize(
    ("torch", "changes", "message"),
    [
        ("2.15.0", {"end": COMPLETE | {"complete": False, "reason": "Ctrl-C"}}, "is incomplete (Ctrl-C): which known"),
        ("2.13.0, 2.15.0", {"merged": [samples.journal() | {"file": "a.json"}]}, "is a merged file"),
        ("", {}, "has torch '', which is not a version number"),
        ("2.15.0", {"schema_version": 3}, "schema_version: 3 is not supported"),
    ],
)
def test_files_that_cannot_be_checked(check, torch, changes, message):
    code, text = check((torch, [samples.case()], changes))
    assert code == 2 and text.startswith("shardproof: DIR/0.json") and message in text and text.count("\n") == 1, text


def test_a_draft_is_of_one_run(tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(samples.journal(samples.case())))
    (tmp_path / "other.json").write_text(path.read_text())
    assert expectations([str(path), str(tmp_path / "other.json")]) == 2
    assert capsys.readouterr().err == "shardproof: a draft is made from one run file; --check takes several\n"
