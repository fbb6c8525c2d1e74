"""Run files of several environments in one. `EXPECTTEST_ACCEPT=1` rewrites what is expected here."""

import gzip
import json

import pytest
from expecttest import assert_expected_inline

from shardproof.commands.merge import merge as merge_command
from shardproof.door import BadFile
from shardproof.reports.matrix import render_summary
from shardproof.reports.merge import merge
from shardproof.runfile import load_run, parse_run
from tests.errors import error_of
from tests.reports import samples


@pytest.fixture
def write(tmp_path):
    """Write a run file of these cases, with an environment of its own, and return its path."""

    def write(name, *cases, run_id, implementations=None, **changes):
        data = samples.journal(*cases)
        data["run_id"] = run_id * 32
        names = [*dict.fromkeys(case["implementation"] for case in cases)]
        told = {one: {"version": "", "capabilities": ["tied"]} for one in names} | (implementations or {})
        top = {key: changes.pop(key) for key in ("effort", "left_out", "end", "selected", "unasked") if key in changes}
        data["environment"] |= {"implementations": told} | changes
        for key in [key for key, value in changes.items() if value is None]:
            del data["environment"][key]
        path = tmp_path / name
        path.write_text(json.dumps(data | top))
        return path

    return write


def of(implementation, **more):
    return samples.case(implementation=implementation, **more)


def merged(*paths):
    """Join files; the result is read as any run file is, and it is valid."""
    result = merge(paths, command=["shardproof", "merge"])
    return result, parse_run(json.loads(json.dumps(result.data)))


def test_what_no_file_asks_and_what_was_left_out_for_torch_stay(write):
    unasked = {"reference": {"INIT-8": "3 ranks", "HYBRID-1": "4 ranks"}, "ddp": {"INIT-8": "3 ranks"}}
    mends = {"gloo": "torch has no ProcessGroupGloo"}
    one = write("one.json", of("reference"), of("ddp"), run_id="1", unasked=unasked, mends=mends)
    asked = write("two.json", of("reference", id="other"), run_id="2", unasked={"reference": {"INIT-8": "3 ranks"}})
    _, run = merged(one, asked)
    assert run.unasked == {"reference": {"INIT-8": "3 ranks"}, "ddp": {"INIT-8": "3 ranks"}}
    assert run.environment.mends == mends


def test_implementations_of_two_environments_stand_in_one_matrix(write):
    one = write(
        "one.json", of("reference"), of("torch.fsdp", verdict="fail", failure=samples.failure("no")), run_id="1"
    )
    name, told = "deepspeed.zero3", {"deepspeed.zero3": {"version": "0.19.8", "capabilities": []}}
    cases = of(name, verdict="unsupported", missing=["tied"]), of(name, id="other", requirement="TIED-1")
    two = write("two.json", *cases, run_id="2", implementations=told, python="3.11.9")
    _, run = merged(one, two)
    assert_expected_inline(
        render_summary(run),
        """\
merged from 2 runs:
  one.json:
    shardproof 0.1.0 (c0ffeec), torch 2.11.0+cu130 (70d970d), Python 3.12.3, NCCL 2.28.9, cuda, 64 cores, 4 x GPU X
    2026-01-02T03:04:05+00:00, 7.5 s
  two.json:
    shardproof 0.1.0 (c0ffeec), torch 2.11.0+cu130 (70d970d), Python 3.11.9, NCCL 2.28.9, cuda, 64 cores, 4 x GPU X
    2026-01-02T03:04:05+00:00, 7.5 s

effort full: all cases

fail: torch.fsdp suites/test_autograd.py::test_unused[w2] (AUTOGRAD-1)
    no

deepspeed.zero3: 1 of 2 cases skipped; what they lack:
  1 unsupported: tied (all for lack of this alone)

requirement  cases  reference  torch.fsdp  deepspeed.zero3
AUTOGRAD-1   1      1 pass     1 fail      1 unsupported
TIED-1       1      -          -           1 pass
all          2      1 pass     1 fail      1 unsupported, 1 pass

1 of 3 cases that ran failed; 1 skipped
""",
    )
    assert (run.environment.python, run.environment.torch) == ("3.12.3, 3.11.9", "2.11.0+cu130")


def test_versions_of_torch_and_devices_stay_apart(write):
    files = [
        write("a.json", of("reference"), run_id="a", torch="2.13.0+cpu", device="cpu"),
        write("b.json", of("reference", id="other"), run_id="b", torch="2.13.0", device="cpu"),
        write("c.json", of("reference"), run_id="c", torch="2.11.0", device="cpu", contract="1"),
        write("d.json", of("reference"), run_id="d", torch="2.13.0", device="cuda", contract="2"),
    ]
    _, run = merged(*files)
    labels = ["reference (torch 2.13.0, cpu)", "reference (torch 2.11.0, cpu)", "reference (torch 2.13.0, cuda)"]
    assert run.implementations == labels
    assert [case.id for case in run.cases if case.implementation == labels[0]] == [run.cases[0].id, "other"]
    assert (run.environment.device, run.environment.contract) == ("mixed", "1, 2")


def test_versions_of_an_implementation_stay_apart(write):
    told = {version: {"x": {"version": version, "capabilities": []}} for version in ("0.1", "0.2")}
    files = [write(f"{key}.json", of("x"), run_id=key[-1], implementations=one) for key, one in told.items()]
    assert merged(*files)[1].implementations == ["x (0.1)", "x (0.2)"]


def test_a_merged_file_can_be_merged_again(write, tmp_path):
    cpu = {"torch": "2.13.0", "device": "cpu"}
    one = write("one.json", of("reference"), run_id="1", **cpu)
    two = write("two.json", of("reference"), run_id="2", **cpu | {"torch": "2.12.0"})
    three = write("three.json", of("ddp"), run_id="3", **cpu)
    both = tmp_path / "both.json"
    assert merge_command([str(one), str(two), "-o", str(both)]) == 0
    _, run = merged(both, three)
    assert run.implementations == ["reference (torch 2.13.0)", "reference (torch 2.12.0)", "ddp (torch 2.13.0)"]
    assert [part.file for part in run.merged] == ["one.json", "two.json", "three.json"]
    _, alone = merged(one, three)
    assert alone.implementations == ["reference", "ddp"], "nothing to tell apart"


@pytest.mark.parametrize(
    ("first", "second", "counts"),
    [
        ("pass", "fail", "fail"),
        ("hang", "pass", "hang"),
        ("unmet", "pass", "pass"),
        ("expected-fail", "unsupported", "expected-fail"),
        ("fail", "crash", "crash"),
    ],
)
def test_a_case_in_two_files_has_the_gravest_verdict_that_ran(write, first, second, counts):
    files = [
        write("1.json", of("reference", verdict=first), run_id="1", started="Tuesday"),
        write("2.json", of("reference", verdict=second), of("reference", id="b"), run_id="2", started="Monday"),
        write("3.json", of("reference", id="c"), of("ddp"), run_id="3", started="Sunday"),
    ]
    result, run = merged(*files)
    assert [case.verdict for case in run.cases] == [counts, "pass", "pass", "pass"]
    assert result.repeated == {"reference": (1, ("Monday", "Tuesday"))}


def test_attempts_stay_together(write):
    file = write("1.json", of("x", verdict="fail"), of("x", attempt=2), run_id="1", selected={"x": [of("x")["id"]]})
    _, run = merged(file, write("2.json", of("x", verdict="unmet"), run_id="2"))
    assert ([case.verdict for case in run.cases], len(run.earlier)) == (["pass"], 1)


def test_what_pytest_skipped_in_one_file_may_have_run_in_the_other(write):
    skipped = {"selected": {"x": ["a", "b"]}, "left_out": [
        {"id": name, "implementation": "x", "reason": "a whim"} for name in ("a", "b")
    ]}  # fmt: skip
    _, run = merged(write("1.json", run_id="1", **skipped), write("2.json", of("x", id="a"), run_id="2"))
    assert [one.id for one in run.left_out] == ["b"]


def test_the_least_effort_is_that_of_the_merged_run(write):
    one = {"name": "quick", "deselected": {"x": {"a.py": 3}}}
    two = {"name": "standard", "deselected": {"x": {"a.py": 1, "b.py": 2}, "y": {"a.py": 1}}}
    files = [write("1.json", of("x"), run_id="1", effort=one), write("2.json", of("y"), run_id="2", effort=two)]
    _, run = merged(*files)
    assert run.effort.name == "quick"
    assert run.effort.deselected == {"x": {"a.py": 3, "b.py": 2}, "y": {"a.py": 1}}
    assert "  2.json, effort standard:\n" in render_summary(run)


def test_a_failure_is_reproduced_under_the_name_that_impl_takes(write):
    fails = {"verdict": "fail", "failure": samples.failure("no"), "nodeid": "t.py::test[x]"}
    cpu, old = {"torch": "2.13.0"}, {"torch": "2.12.0"}
    files = [write("1.json", of("x", **fails), run_id="1", **cpu), write("2.json", of("x"), run_id="2", **old)]
    text = render_summary(merged(*files)[1])
    assert "fail: x (torch 2.13.0) " in text
    assert '  reproduce: python -m pytest "t.py::test[x]" --impl x --device cpu\n' in text


@pytest.mark.parametrize(("codes", "code"), [((0, 0), 0), ((7, 1), 1), ((0, 6), 6)])
def test_the_exit_code_is_that_of_the_run_that_failed(write, codes, code):
    ends = [samples.journal()["end"] | {"exit_code": one} for one in codes]
    files = [write(f"{i}.json", of("x"), run_id=str(i), end=end) for i, end in enumerate(ends)]
    assert merged(*files)[1].end.exit_code == code


@pytest.mark.parametrize(
    ("what", "field", "first", "second"),
    [
        ("shardproof", "shardproof_commit", "a" * 40, "a" * 40 + "-dirty"),
        ("torch", "torch_git_version", "b" * 40, "c" * 40),
    ],
)
def test_no_verdict_is_chosen_out_of_two_commits(write, tmp_path, what, field, first, second):
    one = write("one.json", of("x"), of("x", id="b"), run_id="1", **{field: first})
    two = write("two.json", of("x"), of("x", id="c"), run_id="2", **{field: second})
    again = write("again.json", of("x"), run_id="3", **{field: first})
    skipped = write("skipped.json", of("x", verdict="unmet"), run_id="4", **{field: second})
    other = write("other.json", of("x", id="d"), of("y"), run_id="5", **{field: second})
    older = write("older.json", of("x"), run_id="6", **{field: None})
    unknown = write("unknown.json", of("x"), run_id="7", **{field: "unknown"})
    commits = f"{first[:7]} and {second[:7]}{second[40:]}"
    told = f"both ran 1 case of x, at two commits of {what} ({commits}); shardproof gate compares such runs"
    assert _refusal(one, two) == f"{one} and {two} {told}"
    everything = tmp_path / "all.json"
    assert merge_command(list(map(str, [one, again, skipped, other, older, unknown, "-o", everything]))) == 0
    assert f"at two commits of {what} (" in _refusal(everything, two), "a merged file keeps the commits of its runs"
    assert getattr(load_run(everything).environment, field) == f"{first}, {second}, unknown"


def _refusal(*paths):
    return error_of(merged, *paths, kind=BadFile)


def test_what_cannot_be_joined(write, tmp_path):
    good = write("good.json", of("x"), run_id="1")
    again = write("again.json", of("x"), run_id="1")
    other = write("other.json", of("x"), run_id="2", numerics={"slack_ulps": 9})
    end = {"complete": False, "reason": "SIGTERM", "exit_code": 2, "seconds": 1}
    ended = write("ended.json", of("x"), run_id="3", end=end)
    for path, told in (
        (other, f"its numerics are {{'slack_ulps': 9}}, {good} has {{'slack_ulps': 8}}; run one again"),
        (ended, "is incomplete (SIGTERM); complete runs can be merged"),
    ):
        assert _refusal(good, path) == f"{path}: {told}"
    same = "have the same run, started 2026-01-02T03:04:05+00:00; name it once"
    assert _refusal(good, again) == f"{good} and {again} {same}"


@pytest.mark.parametrize("name", ["all.json", "sub/all.json.gz"])
def test_the_command_writes_a_run_file(write, tmp_path, capsys, name):
    one, two = write("one.json", of("x"), run_id="1"), write("two.json", of("x"), of("y"), run_id="2")
    out = tmp_path / name
    assert merge_command([str(one), str(two), "--output", str(out)]) == 0
    runs = "runs started 2026-01-02T03:04:05+00:00"
    told = f"x: 1 case is in more than one file, of {runs}; the worst verdict of each is kept"
    made = f" (made the folder {out.parent})" if "/" in name else ""
    assert capsys.readouterr().out == f"{told}\n{out}: 2 implementations, 2 records{made}\n"
    assert load_run(out).implementations == ["x", "y"]
    assert out.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
    text = gzip.decompress(out.read_bytes()) if name.endswith(".gz") else out.read_bytes()
    assert len([line for line in text.splitlines() if b'"verdict"' in line]) == 2, "a line for each record"
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


def test_the_command_reports_in_one_line(write, tmp_path, capsys):
    good, out = write("good.json", of("x"), run_id="1"), tmp_path / "out"
    missing = tmp_path / "none.json"
    assert merge_command([str(good), str(missing), "-o", str(out)]) == 2
    assert capsys.readouterr() == ("", f"shardproof: {missing}: No such file or directory\n")
    assert merge_command([str(good), "-o", str(tmp_path)]) == 2
    assert capsys.readouterr() == ("", f"shardproof: {tmp_path}: it is not a regular file\n")
    assert not out.exists()
