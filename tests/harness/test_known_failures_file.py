"""What is known to fail: read, matched, and not one case more excused than the file says."""

from __future__ import annotations

import datetime

import pytest

from shardproof.harness.plugin.known_failures import KnownFailures, load
from shardproof.runfile import Verdict

TODAY = datetime.date(2027, 1, 31)
CASE = "suites/test_clipping.py::test_empty_shards[w4-inf]"
ENTRY = """
[[expect]]
case = "suites/test_clipping.py::test_empty_shards[w4-*]"
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


def test_no_file_expects_nothing(tmp_path):
    assert load(tmp_path, "reference") == []


def test_a_file_may_name_another_whose_entries_come_after_its_own(tmp_path):
    own = ENTRY.replace("raises", "own")
    for name, text in {"wrapped": ENTRY, "wraps": f'also = "wrapped"\n{own}'}.items():
        (tmp_path / f"{name}.toml").write_text(text)
    assert [entry.reason for entry in load(tmp_path, "wraps")] == ["own", "raises"]


@pytest.mark.parametrize("other", ['"absent"', '"wraps"', "3"])
def test_another_file_that_is_none_is_refused(tmp_path, other):
    (tmp_path / "wraps.toml").write_text(f"also = {other}\n{ENTRY}")
    with pytest.raises(ValueError, match=r"wraps.toml: also = .* should be another implementation"):
        load(tmp_path, "wraps")


def test_what_was_expected(read):
    verdict, why = read(ENTRY).judge(CASE, Verdict.FAIL)
    assert (verdict, why) == (Verdict.EXPECTED_FAIL, "raises (findings/F002.py)")


def test_a_pass_is_not_expected(read):
    verdict, why = read(ENTRY).judge(CASE, Verdict.PASS)
    assert verdict == Verdict.UNEXPECTED_PASS
    assert why == "passed, but torch.fully_shard.toml entry 1 expects fail: raises"


def test_another_failure_is_not_excused(read):
    verdict, why = read(ENTRY).judge(CASE, Verdict.HANG)
    assert (verdict, why) == (Verdict.HANG, "torch.fully_shard.toml entry 1 expects fail, not hang")


@pytest.mark.parametrize("skip", [Verdict.UNMET, Verdict.UNSUPPORTED])
def test_a_skip_is_left_alone(read, skip):
    assert read(ENTRY).judge(CASE, skip) == (skip, "")


@pytest.mark.parametrize(
    "other",
    [
        "suites/test_clipping.py::test_empty_shards[w2-inf]",
        "suites/test_clipping.py::test_empty_shards",
        "suites/test_clipping.py::test_empty_shards4",
        "suites/test_training.py::test_empty_shards[w4-inf]",
    ],
)
def test_other_cases_are_not_excused(read, other):
    assert read(ENTRY).judge(other, Verdict.FAIL) == (Verdict.FAIL, "")


@pytest.mark.parametrize(
    ("specifiers", "applies"),
    [("", True), (">=2.11,<2.14", True), ("<2.13", False), ("==2.13.*", True), (">=2.14", False)],
)
def test_versions_of_torch(read, specifiers, applies):
    expectations = read(ENTRY + f'torch = "{specifiers}"')
    assert (expectations.judge(CASE, Verdict.FAIL)[0] == Verdict.EXPECTED_FAIL) is applies
    # An entry of another version is not out of date.
    assert bool(expectations.problems([], is_complete=True)) is applies


@pytest.mark.parametrize(("device", "applies"), [("cpu", True), ("cuda", False)])
def test_devices(read, device, applies):
    expectations = read(ENTRY + f'device = "{device}"')
    assert (expectations.judge(CASE, Verdict.FAIL)[0] == Verdict.EXPECTED_FAIL) is applies
    assert bool(expectations.problems([], is_complete=True)) is applies


@pytest.mark.parametrize(("backend", "applies"), [("gloo", True), ("nccl", False)])
def test_backends(read, backend, applies):
    expectations = read(ENTRY + f'backend = "{backend}"')
    assert (expectations.judge(CASE, Verdict.FAIL)[0] == Verdict.EXPECTED_FAIL) is applies
    assert bool(expectations.problems([], is_complete=True)) is applies


def test_gloo_on_gpus(read):
    """Ranks that share a GPU: device and backend are told apart."""
    expectations = read(ENTRY + 'device = "cuda"\nbackend = "gloo"', device="cuda")
    assert expectations.judge(CASE, Verdict.FAIL)[0] == Verdict.EXPECTED_FAIL


@pytest.mark.parametrize(
    "version", ["2.16.0.dev20270101+git", "2.16.0a0+git1", "2.16.0rc1", "2.16.0+cu132", "2.16.0", "2.16.1"]
)
@pytest.mark.parametrize(
    ("specifiers", "applies"), [(">=2.16", True), ("<2.16", False), (">=2.11,<2.17", True), (">2.15,<=2.16.1", True)]
)
def test_versions_before_a_release_count_as_the_release(read, version, specifiers, applies):
    expectations = read(ENTRY + f'torch = "{specifiers}"', torch_version=version)
    assert (expectations.first(CASE) is not None) is applies


def test_an_expired_entry_excuses_nothing_and_fails_the_run(read):
    expectations = read(ENTRY + "expires = 2027-01-30")
    assert expectations.judge(CASE, Verdict.FAIL) == (Verdict.FAIL, "")
    assert expectations.problems([CASE], is_complete=False) == [
        "torch.fully_shard.toml entry 1 expired on 2027-01-30: "
        "suites/test_clipping.py::test_empty_shards[w4-*] (raises)"
    ]
    assert read(ENTRY + "expires = 2027-01-31").problems([CASE], is_complete=True) == []


def test_an_entry_without_a_case_fails_a_complete_run(read):
    expectations = read(ENTRY)
    assert expectations.problems(["suites/test_x.py::test_y"], is_complete=False) == []
    assert expectations.problems(["suites/test_x.py::test_y"], is_complete=True) == [
        "torch.fully_shard.toml entry 1 matches no case: suites/test_clipping.py::test_empty_shards[w4-*]"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[expect", "torch.fully_shard.toml: "),
        ("[expect]\ncase = 'x'", "with two brackets"),
        ("[[expected]]\n", "unknown 'expected'"),
        (ENTRY.replace("reason", "reasons"), "entry 1: 'reason' is missing"),
        (ENTRY + "until = 2027-01-01", "entry 1: unknown 'until'"),
        (ENTRY.replace('"raises"', '" "'), r"entry 1: reason = ' ' should be a non-empty string"),
        (ENTRY.replace('"fail"', '"pass"'), "'pass' should be one of fail, hang, crash"),
        (ENTRY + 'torch = "2.13"', "torch = '2.13' should be a version specifier such as"),
        (ENTRY + "torch = 2.13", "torch = 2.13 should be a version specifier such as"),
        (ENTRY + 'backend = "mpi"', "backend = 'mpi' should be one of gloo, nccl"),
        (ENTRY + 'device = "gpu"', "device = 'gpu' should be one of cpu, cuda"),
        (ENTRY + 'expires = "2027-01-01"', "expires = '2027-01-01' should be a date"),
        (ENTRY + "expires = 2027-01-01T00:00:00", "should be a date"),
        (ENTRY + ENTRY.replace("link", "url"), "entry 2: 'link' is missing"),
    ],
)
def test_what_is_wrong_is_named(read, text, message):
    with pytest.raises(ValueError, match=message):
        read(text)
