"""Reading a run file: every way in which a file can be wrong ends in one line."""

import gzip
import json
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof import door, jsonfiles, runfile
from shardproof.door import BadFile
from shardproof.jsonfiles import RecordError
from shardproof.runfile import Verdict, load_run, parse_run
from tests.errors import error_of
from tests.reports import samples
from tests.reports.test_record import EXPLAINED

PUBLISHED = Path(__file__).parents[2] / "reports/published"
END = samples.run()["end"]
QUICK = {"name": "quick", "deselected": {"a": {"b": "c"}}}
HUGE = json.dumps(samples.journal(samples.case(seconds=10**400))).encode()
TWICE = [samples.case(), samples.case(implementation="other"), samples.case(verdict="fail")]
KNOWN = ("source", "case", "link", "torch")


@pytest.fixture
def written(tmp_path):
    """A function that writes a run file with the given bytes and returns its path."""

    def write(content):
        path = tmp_path / "run.json"
        path.write_bytes(content)
        return path

    return write


def test_implementations_keep_the_order_of_the_command_and_miss_none():
    cases = [samples.case(implementation=name) for name in ("stray", "b")]
    run = parse_run(samples.run(*cases, implementations={"b": {}, "a": {}}))
    assert run.implementations == ["b", "a", "stray"]


@pytest.mark.parametrize(
    "data, message",
    [
        ([], "the file: [] is not an object"),
        ({}, "the file: the field 'schema_version' is missing"),
        ({"schema_version": "1"}, "schema_version: '1' is not an integer"),
        ({"schema_version": 3, "records": []}, "schema_version: 3 is not supported; supported: 2"),
        ({"schema_version": 2}, "the file: the field 'run_id' is missing"),
        (samples.journal() | {"end": {"complete": 1}}, "end.complete: 1 is not true or false"),
        (samples.journal() | {"end": {"complete": False}}, "end: the field 'reason' is missing"),
        (samples.journal() | {"selected": {"a": ["b", 3]}}, "selected.a[1]: 3 is not a string"),
        (samples.journal() | {"effort": "quick"}, "effort: 'quick' is not an object"),
        (samples.journal() | {"effort": {}}, "effort: the field 'name' is missing"),
        (samples.journal() | {"effort": QUICK}, "effort.deselected.a.b: 'c' is not an integer"),
        (
            {"schema_version": 2, "run_id": "x", "end": samples.run()["end"]},
            "the file: the field 'environment' is missing",
        ),
        (samples.run() | {"cases": {}}, "cases: {} is not a list"),
        (samples.journal() | {"merged": []}, "merged: it is empty"),
        (samples.run(None), "cases[0]: None is not an object"),
        (samples.run(cpu_count="2"), "environment.cpu_count: '2' is not an integer"),
        (samples.run(accelerators=[{}]), "environment.accelerators[0]: the field 'name' is missing"),
        (samples.run(implementations={"a": 1}), "environment.implementations.a: 1 is not an object"),
        (samples.run(*TWICE), f"cases[2].id: '{TWICE[0]['id']}' on 'reference' is in the file twice"),
        # What was taken out of a file by hand must not look as if it had never been there.
        (
            samples.journal(samples.case(id="a"), selected={"reference": ["a", "b"]}),
            "end.complete: true, but 'b' was selected for 'reference' and has no record",
        ),
    ],
)
def test_what_breaks_the_schema_is_named(data, message):
    assert error_of(parse_run, data, kind=RecordError) == message


def test_an_incomplete_run_names_what_did_not_run():
    data = samples.journal(samples.case(id="a"), selected={"reference": ["a", "b", "c"]}, reason="SIGTERM")
    data["left_out"] = [{"id": "c", "implementation": "reference", "reason": "Skipped"}]
    run = parse_run(data)
    assert (run.incomplete, run.not_run) == ("SIGTERM", [("reference", "b")])
    assert run.end.seconds == 7.5


def test_the_last_attempt_counts_and_the_earlier_ones_are_kept():
    attempts = [samples.case(verdict="fail"), samples.case(attempt=2), samples.case(id="other")]
    run = parse_run(samples.journal(*attempts))
    assert [(case.id, case.attempt) for case in run.cases] == [(attempts[1]["id"], 2), ("other", 1)]
    assert [(case.verdict, case.attempt) for case in run.earlier] == [("fail", 1)]
    for wrong in ([attempts[1]], [attempts[0], samples.case(attempt=3)], [attempts[0], attempts[0]]):
        with pytest.raises(RecordError, match="is in the file twice"):
            parse_run(samples.journal(*wrong))


def test_the_schema_is_printed_as_the_dataclasses_make_it():
    """`python -m shardproof.runfile` prints it, without torch."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "shardproof.runfile"], cwd=PUBLISHED.parents[1], capture_output=True, text=True
    )
    assert json.loads(done.stdout) == json.loads(json.dumps(runfile.schema())), done.stderr


def test_what_is_written_is_what_was_read():
    """Field by field, each of its own type."""
    whole = samples.journal(samples.whole_case(), samples.case(id="b", known_failure=dict.fromkeys(KNOWN, "x")))
    whole["cases"][0] |= {"explanation": EXPLAINED, "hosts": ["a", "b"], "examples": 0, "peak_bytes": [1, 2]}
    whole["environment"]["torchrun"] = {"run_id": "job", "attempt": 0, "agent": "", "ranks": 2, "hosts": 1}
    whole["unasked"] = {"reference": {"INIT-8": "4 ranks"}}
    run = parse_run(whole)
    assert jsonfiles.encode(run) == whole
    case = run.cases[0]
    assert (case.verdict, case.failure.element, case.losses["sharded"]) == (Verdict.FAIL, (3, 4), (1.5, 1.25))
    assert math.isnan(case.losses["oracle"][1]) and case.explanation.first.ulps == {"sharded": math.inf}
    assert case.reason == "first, gathered parameter of head.weight diverges in step 1 on rank 0"


def test_what_is_no_regular_file_is_one_line(tmp_path):
    """Opening a named pipe would wait for a writer."""
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(BadFile, match=r"run.json: not a regular file$"):
        load_run(tmp_path / "run.json")


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_huge_file_is_one_line(tmp_path, name, monkeypatch):
    monkeypatch.setattr(door, "MOST_BYTES", 1 << 20)
    content = b" " * (1 << 22)
    tmp_path.joinpath(name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(BadFile, match=f"{name}: more than 1 MiB of text$"):
        load_run(tmp_path / name)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "not a JSON file: Expecting value.*"),
        (b'{"schema_version": 2,', "not a JSON file: .*line 1 column 22.*"),
        (b"\xff\xfe\xfd", "not a JSON file: .*decode.*"),
        (b"[" * 100_000, "lists and objects more than 64 deep"),
        (b"1" * 5000, "not a JSON file: .*digits.*"),
        (b'{"schema_version": 7}', "schema_version: 7 is not supported; supported: 2"),
        (HUGE, r"cases\[0\].seconds: 10+.* is not a number"),
    ],
    ids=["empty", "cut short", "no Unicode", "nested", "long number", "version", "no float"],
)
def test_a_bad_file_is_one_line_that_begins_with_its_name(written, content, message):
    path = written(content)
    assert re.fullmatch(f"{re.escape(str(path))}: {message}", error_of(load_run, path, kind=BadFile))


def test_a_missing_file_and_a_folder_are_said_so(tmp_path):
    for path, why in ((tmp_path / "none.json", "No such file or directory"), (tmp_path, "Is a directory")):
        assert error_of(load_run, path, kind=BadFile) == f"{path}: {why}"


@pytest.mark.parametrize(
    "change",
    [lambda _: b"{}", lambda _: b"", lambda content: content[:-1], lambda content: content[:12] + b"x" * 99],
    ids=["plain", "empty", "cut short", "broken"],
)
def test_what_is_not_compressed_although_its_name_says_so_is_one_line(tmp_path, change):
    path = tmp_path / "run.json.gz"
    path.write_bytes(change(gzip.compress(b"{}" * 99)))
    text = error_of(load_run, path, kind=BadFile)
    assert re.fullmatch(f"{path}: not (compressed by gzip|a JSON file): .*", text)


@pytest.mark.sampled
@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.json.gz")), ids=lambda path: path.name)
def test_published_runs_stay_readable(path):
    """Their records are kept so that later pages need no rerun."""
    run = load_run(path)
    assert run.cases
    assert run.environment.torch and run.environment.device


class _Trap:
    """Unpickling one leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_is_never_opened(written, tmp_path):
    sprung = tmp_path / "sprung"
    with pytest.raises(BadFile):
        load_run(written(pickle.dumps(_Trap(sprung))))
    assert not sprung.exists()
