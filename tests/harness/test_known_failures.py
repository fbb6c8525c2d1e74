"""What is known to fail: read, matched, not one case more excused than the file says, and when a run says so."""

import datetime
import fnmatch
import json

import pytest
import torch

from shardproof import runfile
from shardproof.harness.plugin.known_failures import KnownFailures, load, load_given
from shardproof.runfile import Verdict
from tests.harness.inner import error_lines, last_error

pytestmark = pytest.mark.sampled

SOURCE = """
import os
import pytest
from shardproof.testing import world
@world(1)
@pytest.mark.parametrize("how", ["passes", "fails"])
def test_case(rank, how):
    assert how != "fails"
@world(1)
def test_other(rank):
    pass
"""
FAILS = "test_inner.py::test_case[w1-fails]"
STALE = "test_inner.py::test_gone*"


def entry(*cases, verdict="fail", **more):
    """One entry as TOML."""
    fields = {"verdict": verdict, "reason": "it is known", "link": "findings"}
    lines = [f"cases = {json.dumps(cases)}", *(f'{name} = "{value}"' for name, value in fields.items())]
    return "\n".join(["[[expect]]", *lines, *(f"{name} = {value}" for name, value in more.items())]) + "\n"


@pytest.fixture
def expect(pytester):
    """Write the file of an implementation beside the inner cases."""

    def expect(*entries, implementation="ddp"):
        folder = pytester.path / "expectations"
        folder.mkdir(exist_ok=True)
        (folder / f"{implementation}.toml").write_text("\n".join(entries))

    return expect


def verdicts(pytester, name="run.json"):
    cases = json.loads(pytester.path.joinpath(name).read_text())["cases"]
    return {(case["implementation"], case["id"].partition("::")[2]): case for case in cases}


# What is excused


def test_an_expected_failure_is_one_implementations_own(run, expect, pytester):
    expect(entry(FAILS))
    result = run(SOURCE, "--impl", "ddp,reference", "--report", "run.json")
    result.assert_outcomes(passed=4, xfailed=1, failed=1)
    result.stdout.fnmatch_lines(["ddp: 1 expected-fail, 2 pass", "reference: 1 fail, 2 pass"])
    reasons = [getattr(report, "wasxfail", None) for report in result.reprec.getreports("pytest_runtest_logreport")]
    # Some versions of pytest write "reason: " before it.
    assert {reason.removeprefix("reason: ") for reason in reasons if reason} == {"fail: it is known (findings)"}
    found = verdicts(pytester)
    assert found["reference", "test_case[w1-fails]"]["verdict"] == "fail"
    known = found["ddp", "test_case[w1-fails]"]
    assert (known["verdict"], known["expected"]) == ("expected-fail", "fail: it is known (findings)")
    assert "AssertionError" in known["failure"]["text"], "what failed is still there to read"


def test_an_unexpected_pass_fails_and_names_the_entry(run, expect, pytester):
    expect(entry(FAILS), entry("test_inner.py::test_case[w1-passes]"))
    result = run(SOURCE, "--report", "run.json")
    result.assert_outcomes(passed=1, xfailed=1, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    told = "passed, but ddp.toml entry 2 expects fail: it is known"
    result.stdout.fnmatch_lines([f"unexpected-pass: {told}", "reproduce: *"])
    case = verdicts(pytester)["ddp", "test_case[w1-passes]"]
    assert (case["verdict"], case["failure"]["text"], case["expected"]) == ("unexpected-pass", told, "")
    known = {"case": "test_inner.py::test_case[w1-passes]", "link": "findings", "torch": ""}
    assert case["known_failure"] == known | {"source": "ddp.toml entry 2"}
    assert verdicts(pytester)["ddp", "test_case[w1-fails]"]["known_failure"]["source"] == "ddp.toml entry 1"
    assert "known_failure" not in verdicts(pytester)["ddp", "test_other[w1]"]


CRASHES = SOURCE.replace('how != "fails"', 'how != "fails" or os._exit(3)')


@pytest.mark.parametrize(("source", "verdict", "found"), [(SOURCE, "crash", "fail"), (CRASHES, "fail", "crash")])
def test_another_failure_is_not_excused(run, expect, source, verdict, found):
    expect(entry(FAILS, verdict=verdict))
    result = run(source)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines([f"{found}: *", f"ddp.toml entry 1 expects {verdict}, not {found}"])


def test_a_crash_can_be_expected(run, expect):
    expect(entry(FAILS, verdict="crash"))
    result = run(CRASHES)
    result.assert_outcomes(passed=2, xfailed=1)
    assert result.ret == pytest.ExitCode.OK


@pytest.mark.parametrize("more", [{"torch": f'"!={torch.__version__.partition("+")[0]}"'}, {"device": '"cuda"'}])
def test_entries_of_other_versions_and_devices_say_nothing(run, expect, more):
    expect(entry(FAILS, **more), entry(STALE, **more))
    result = run(SOURCE, "--device", "cpu")
    result.assert_outcomes(passed=2, failed=1)
    assert error_lines(result) == []


def test_runxfail_forgets_expectations(run, expect):
    expect(entry(FAILS), entry("test_inner.py::test_other*"))
    run(SOURCE, "--runxfail").assert_outcomes(passed=2, failed=1)


# What is wrong with the entries themselves

OUT_OF_DATE = "ERROR: expectations/ddp.toml entry 2 matches no case: test_inner.py::test_gone*"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_entry_without_a_case_fails_a_complete_run(run, expect, pytester, workers):
    expect(entry(FAILS), entry(STALE))
    result = run(SOURCE, "-n", workers, "--report", "run.json", own_process=workers != "0")
    result.assert_outcomes(passed=2, xfailed=1)
    assert (result.ret, last_error(result)) == (pytest.ExitCode.TESTS_FAILED, OUT_OF_DATE)
    end = json.loads(pytester.path.joinpath("run.json").read_text())["end"]
    assert [f"ERROR: {problem}" for problem in end["problems"]] == [OUT_OF_DATE]


@pytest.mark.parametrize(
    "options",
    [
        *(("-k", "passes"), ("-m", "not slow"), ("--deselect", "test_inner.py::test_other"), ("--world", "1")),
        *(("test_inner.py::test_other",), ("test_inner.py::test_other", "-n", "1"), ("test_inner.py",)),
        *(("--collect-only",), ("--ignore", "test_second.py")),
    ],
    ids="_".join,
)
def test_a_part_of_the_cases_does_not_tell(run, expect, pytester, options):
    expect(entry(FAILS), entry(STALE))
    pytester.path.joinpath("test_second.py").write_text("def test_second():\n    pass\n")
    pytester.makeini("[pytest]\nmarkers = slow: is slow")
    result = run(SOURCE.replace("def test_other", "@pytest.mark.slow\ndef test_other"), *options)
    assert (result.ret, error_lines(result)) == (pytest.ExitCode.OK, [])


def test_a_file_that_does_not_import_is_missing(run, expect, pytester):
    expect(entry(FAILS), entry(STALE))
    pytester.path.joinpath("test_second.py").write_text("import nothing_of_that_name")
    result = run(SOURCE, "--continue-on-collection-errors")
    result.assert_outcomes(passed=2, xfailed=1, errors=1)
    assert OUT_OF_DATE not in result.stdout.lines


def test_nightly_cases_are_always_left_out(run, expect, pytester):
    """A run without them is as complete as an ordinary run can be, and an entry about one of them has its case."""
    expect(entry(FAILS), entry(STALE), entry("test_inner.py::test_other*"))
    pytester.makeini("[pytest]\naddopts = -m 'not nightly'")
    result = run(SOURCE.replace("def test_other", "@pytest.mark.nightly\ndef test_other"))
    result.assert_outcomes(passed=1, xfailed=1, deselected=1)
    assert (result.ret, last_error(result)) == (pytest.ExitCode.TESTS_FAILED, OUT_OF_DATE)


def test_all_chapters_together_are_complete(run, expect, pytester):
    expect(entry(FAILS), entry(STALE))
    pytester.path.joinpath("test_second.py").write_text("def test_plain():\n    pass\n")
    assert last_error(run(SOURCE, "test_inner.py", "test_second.py")) == OUT_OF_DATE


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_file_that_cannot_be_read_is_a_usage_error(run, expect, workers):
    expect(entry(FAILS, verdict="unmet"), entry(STALE))
    result = run(SOURCE, "-n", workers, own_process=workers != "0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    line = "ERROR: expectations/ddp.toml entry 1: verdict = 'unmet' should be one of fail, hang, crash, pass"
    assert last_error(result) == line
    result.assert_outcomes()


def test_other_implementations_files_are_not_read(run, expect):
    expect("no TOML", implementation="reference")
    assert run(SOURCE.replace('!= "fails"', '!= ""')).ret == pytest.ExitCode.OK


# --expectations


def beside(pytester, *entries, name="own/ddp.toml", first=""):
    """Write a file of known failures that is in no folder of cases."""
    path = pytester.path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([first, *entries]))
    return name


@pytest.mark.parametrize(
    ("name", "first"), [("own/ddp.toml", ""), ("own.toml", 'implementation = "ddp"')], ids=["named", "named-inside"]
)
def test_a_file_of_expectations_excuses_as_those_beside_the_cases_do(run, pytester, name, first):
    given = beside(pytester, entry(FAILS), name=name, first=first)
    result = run(SOURCE, "--expectations", given, "--impl", "ddp,reference")
    result.assert_outcomes(passed=4, xfailed=1, failed=1)
    result.stdout.fnmatch_lines(["ddp: 1 expected-fail, 2 pass", "reference: 1 fail, 2 pass"])


def test_several_files_of_expectations_come_before_those_beside_the_cases(run, expect, pytester):
    expect(entry(FAILS, verdict="crash"), entry("test_inner.py::test_other[w1]"))
    one = beside(pytester, entry(FAILS))
    two = beside(pytester, entry("test_inner.py::test_case[w1-passes]"), name="more/ddp.toml")
    result = run(SOURCE, "-v", "--expectations", one, "--expectations", two)
    result.assert_outcomes(xfailed=1, failed=2)
    lines = [f"FAILED *test_{case}] - unexpected-pass: *" for case in ("case[[]ddp-w1-passes", "other[[]ddp-w1")]
    told = "unexpected-pass: passed, but ddp.toml entry 1 expects fail: it is known"
    result.stdout.fnmatch_lines_random([told, *lines])


def test_an_entry_of_a_file_of_expectations_that_matches_nothing(run, pytester):
    """Of the folder whose cases all ran; what it lists of another folder may be there in another run."""
    given = beside(pytester, entry(FAILS), entry(STALE), entry("suites/test_gone.py::test_gone*"))
    result = run(SOURCE, "--expectations", given)
    result.assert_outcomes(passed=2, xfailed=1)
    assert last_error(result) == f"ERROR: --expectations ddp.toml entry 2 matches no case: {STALE}"
    assert run(SOURCE, "--expectations", given, "-k", "fails").ret == pytest.ExitCode.OK


def test_a_folder_of_the_name_of_the_packaged_suites_has_entries_for_both(run, pytester):
    folder = pytester.mkdir("suites")
    (folder / "test_own.py").write_text(SOURCE)
    own, packaged = "suites/test_own.py::test_case[w1-fails]", "suites/test_training.py::test_single_unit*"
    given = beside(pytester, entry(own), entry(packaged), entry("suites/test_own.py::test_gone*"))
    result = run("", "suites", "--expectations", given)
    line = "ERROR: --expectations ddp.toml entry 3 matches no case: suites/test_own.py::test_gone*"
    assert last_error(result) == line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "none.toml: No such file or directory"),
        ("expect = 1", "none.toml: entries are [[expect]], with two brackets"),
        ("[[expect]]", "none.toml entry 1: 'cases' is missing"),
        ("[", "none.toml: *"),
        ("implementation = 3", "none.toml: implementation = 3 should be a name that --impl takes"),
        ("", "none.toml: there is no 'none' in --impl ddp; name the file after one of them, or begin it with *"),
    ],
)
def test_a_file_of_expectations_that_cannot_be_used_ends_the_run(refused, pytester, text, told):
    if text is not None:
        pytester.path.joinpath("none.toml").write_text(text)
    line = refused(SOURCE, "--expectations", "none.toml")
    assert fnmatch.fnmatchcase(line, f"ERROR: --expectations {told}".replace("[", "[[]"))


# The file

TODAY = datetime.date(2027, 1, 31)
EMPTY_SHARDS = "suites/test_clipping.py::test_empty_shards[w4-inf]"
CASES = '["suites/test_clipping.py::test_empty_shards[w4-*]"]'
AN_ENTRY = f"""
[[expect]]
cases = {CASES}
verdict = "fail"
reason = "raises"
link = "findings/F002.py"
"""


@pytest.fixture
def read(tmp_path):
    def read(text, *, torch_version="2.13.0+cpu", device="cpu", backend="gloo", today=TODAY):
        (tmp_path / "torch.fully_shard.toml").write_text(text)
        entries = load(tmp_path, "torch.fully_shard")
        return KnownFailures(entries, torch_version=torch_version, device=device, backend=backend, today=today)

    return read


def test_an_entry_says_the_same_of_each_of_its_patterns(read):
    stale, other = "suites/test_clipping.py::test_gone*", "suites/test_tied.py::test_other[w2]"
    known = read(AN_ENTRY.replace(CASES, json.dumps([stale, *json.loads(CASES), other])))
    assert [known.judge(case, Verdict.FAIL) for case in (EMPTY_SHARDS, other)] == [
        (Verdict.EXPECTED_FAIL, "raises (findings/F002.py)")
    ] * 2
    assert known.first(other).as_record() == runfile.KnownFailure(
        source="torch.fully_shard.toml entry 1", case=other, link="findings/F002.py", torch=""
    )
    assert known.problems([EMPTY_SHARDS, other], is_complete=True) == [
        f"torch.fully_shard.toml entry 1 matches no case: {stale}"
    ]


def test_a_file_may_name_another_whose_entries_come_after_its_own(tmp_path):
    own = AN_ENTRY.replace("raises", "own")
    for name, text in {"wrapped": AN_ENTRY, "wraps": f'also = "wrapped"\n{own}'}.items():
        (tmp_path / f"{name}.toml").write_text(text)
    assert [entry.reason for entry in load(tmp_path, "wraps")] == ["own", "raises"]


def test_a_file_of_expectations_may_name_one_of_the_packaged_suites(tmp_path):
    """As somebody's wrapper of torch's ``fully_shard`` does, whose repository has no file of that."""
    path = tmp_path / "ours.toml"
    path.write_text(f'also = "torch.fully_shard"\n{AN_ENTRY}')
    name, (own, *inherited) = load_given(path)
    assert (name, own.reason) == ("ours", "raises")
    assert {entry.link for entry in inherited} >= {"findings/F002.py", "findings/F358.py"}


@pytest.mark.parametrize("other", ['"absent"', '"wraps"', "3"])
def test_another_file_that_is_none_is_refused(tmp_path, other):
    (tmp_path / "wraps.toml").write_text(f"also = {other}\n{AN_ENTRY}")
    with pytest.raises(ValueError, match=r"wraps.toml: also = .* should be another implementation"):
        load(tmp_path, "wraps")


@pytest.mark.parametrize("skip", [Verdict.UNMET, Verdict.UNSUPPORTED])
def test_a_skip_is_left_alone(read, skip):
    assert read(AN_ENTRY).judge(EMPTY_SHARDS, skip) == (skip, "")


@pytest.mark.parametrize("other", ["clipping.py::{}[w2-inf]", "clipping.py::{}", "clipping.py::{}4", "tied.py::{}[w4]"])
def test_other_cases_are_not_excused(read, other):
    case = f"suites/test_{other.format('test_empty_shards')}"
    assert read(AN_ENTRY).judge(case, Verdict.FAIL) == (Verdict.FAIL, "")


@pytest.mark.parametrize(
    ("condition", "applies"),
    [
        *(('torch = ""', True), ('torch = ">=2.11,<2.14"', True), ('torch = "==2.13.*"', True)),
        *(('torch = "<2.13"', False), ('torch = ">=2.14"', False), ('device = "cpu"', False)),
        *(('device = "cuda"', True), ('backend = "gloo"', True), ('backend = "nccl"', False)),
        ('device = "cuda"\nbackend = "gloo"', True),
    ],
)
def test_versions_devices_and_backends(read, condition, applies):
    """Of ranks that share a GPU: device and backend are told apart."""
    expectations = read(AN_ENTRY + condition, device="cuda")
    assert (expectations.judge(EMPTY_SHARDS, Verdict.FAIL)[0] == Verdict.EXPECTED_FAIL) is applies
    # An entry of another version, device or backend is not out of date.
    assert bool(expectations.problems([], is_complete=True)) is applies


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL])
def test_an_entry_that_expects_a_pass_takes_cases_out_of_later_ones(read, verdict):
    assert read(AN_ENTRY.replace('"fail"', '"pass"') + AN_ENTRY).judge(EMPTY_SHARDS, verdict) == (verdict, "")


@pytest.mark.parametrize(
    "version", ["2.16.0.dev20270101+git", "2.16.0a0+git1", "2.16.0rc1", "2.16.0+cu132", "2.16.0", "2.16.1"]
)
@pytest.mark.parametrize(
    ("specifiers", "applies"), [(">=2.16", True), ("<2.16", False), (">=2.11,<2.17", True), (">2.15,<=2.16.1", True)]
)
def test_versions_before_a_release_count_as_the_release(read, version, specifiers, applies):
    expectations = read(AN_ENTRY + f'torch = "{specifiers}"', torch_version=version)
    assert (expectations.first(EMPTY_SHARDS) is not None) is applies


def test_an_expired_entry_excuses_nothing_and_fails_the_run(read):
    expectations = read(AN_ENTRY + "expires = 2027-01-30")
    assert expectations.judge(EMPTY_SHARDS, Verdict.FAIL) == (Verdict.FAIL, "")
    line = "entry 1 expired on 2027-01-30: suites/test_clipping.py::test_empty_shards[w4-*] (raises)"
    assert expectations.problems([EMPTY_SHARDS], is_complete=False) == [f"torch.fully_shard.toml {line}"]
    assert read(AN_ENTRY + "expires = 2027-01-31").problems([EMPTY_SHARDS], is_complete=True) == []


def test_a_race_may_pass_and_may_fail_as_expected(read):
    expectations = read(AN_ENTRY + "races = true")
    assert expectations.judge(EMPTY_SHARDS, Verdict.PASS) == (Verdict.PASS, "")
    assert expectations.judge(EMPTY_SHARDS, Verdict.FAIL)[0] == Verdict.EXPECTED_FAIL
    assert expectations.judge(EMPTY_SHARDS, Verdict.HANG)[0] == Verdict.HANG
    assert read(AN_ENTRY + "races = false").judge(EMPTY_SHARDS, Verdict.PASS)[0] == Verdict.UNEXPECTED_PASS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[expect", "torch.fully_shard.toml: "),
        ("[expect]\ncase = 'x'", "with two brackets"),
        ("[[expected]]\n", "unknown 'expected'"),
        (AN_ENTRY.replace("reason", "reasons"), "entry 1: 'reason' is missing"),
        (AN_ENTRY + "until = 2027-01-01", "entry 1: unknown 'until'"),
        (AN_ENTRY.replace('"raises"', '" "'), r"entry 1: reason = ' ' should be a non-empty string"),
        *(
            (AN_ENTRY.replace(CASES, value), rf"entry 1: cases = {told} should be a list of patterns, each a non-empty")
            for value, told in (("[]", r"\[\]"), ('"x"', "'x'"), ("[1]", r"\[1\]"), ('["x", " "]', r"\['x', ' '\]"))
        ),
        (AN_ENTRY.replace('"fail"', '"unmet"'), "'unmet' should be one of fail, hang, crash, pass"),
        (AN_ENTRY + 'torch = "2.13"', "torch = '2.13' should be a version specifier such as"),
        (AN_ENTRY + "torch = 2.13", "torch = 2.13 should be a version specifier such as"),
        (AN_ENTRY + 'backend = "mpi"', "backend = 'mpi' should be one of gloo, hccl, nccl, xccl"),
        (AN_ENTRY + 'device = "gpu"', "device = 'gpu' should be one of cpu, cuda, hpu, npu, xpu"),
        (AN_ENTRY + 'expires = "2027-01-01"', "expires = '2027-01-01' should be a date"),
        (AN_ENTRY + "expires = 2027-01-01T00:00:00", "should be a date"),
        (AN_ENTRY + 'races = "true"', "races = 'true' should be true or false, without quotes"),
        (AN_ENTRY + AN_ENTRY.replace("link", "url"), "entry 2: 'link' is missing"),
    ],
)
def test_what_is_wrong_is_named(read, text, message):
    with pytest.raises(ValueError, match=message):
        read(text)
