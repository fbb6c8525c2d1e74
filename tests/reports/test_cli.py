"""`shardproof report`, as a user starts it."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reports import samples

ROOT = Path(__file__).parents[2]


def report(*arguments, **environment):
    """Run the command line in a process of its own, and return what came of it."""
    command, env = [sys.executable, "-m", "shardproof", "report", *map(str, arguments)], os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, encoding="utf-8")


def written(path, *cases, **fields):
    """A run file of these cases with these fields; its path."""
    path.write_text(json.dumps(samples.journal(*cases) | fields) + "\n")
    return path


@pytest.fixture
def failing(tmp_path):
    """A run file with one failing case, whose text is not ASCII and not even Unicode."""
    return written(tmp_path / "run.json", samples.case(verdict="fail", failure={"text": "größer \ud800"}))


def test_a_summary_reads_and_does_not_judge(failing):
    done = report(failing)
    assert (done.returncode, done.stderr) == (0, "")
    assert "AUTOGRAD-1   1      1 fail\n" in done.stdout
    assert "1 of 1 case that ran failed" in done.stdout


@pytest.mark.parametrize(("options", "count"), [((), "1 "), (("--cases",), "")], ids=["requirements", "cases"])
def test_colour_changes_no_text(tmp_path, options, count):
    colours = {"crash": 31, "unmet": 33, "expected-fail": 33, "pass": 32}
    cases = [samples.case(id=one, requirement=one.upper(), verdict=one, missing=["2 pass"]) for one in colours]
    path = written(tmp_path / "run.json", *cases, samples.case(verdict="fail", failure={"text": "    pass\n1 fail"}))
    plain, done = report(path, *options).stdout, report(path, *options, FORCE_COLOR="1").stdout
    assert re.sub(r"\x1b\[\d+m", "", done) == plain and "\x1b" not in plain
    for verdict, colour in colours.items():
        assert f"  \x1b[{colour}m{count}{verdict}\x1b[0m\n" in done
    assert "\n        pass\n    1 fail\n" in done, "the text of a failure is as it is"
    assert done.endswith("\n\n\x1b[31m2 of 4 cases that ran failed\x1b[0m; 1 skipped\n")


@pytest.mark.parametrize(
    ("environment", "is_coloured"),
    [({"NO_COLOR": ""}, True), ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_is_coloured(failing, environment, is_coloured):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "shardproof", "report", str(failing)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TERM": "xterm"} | environment, stdout=theirs, check=True)
    os.close(theirs)
    assert (b"\x1b[31mfail\x1b[0m: reference" in os.read(ours, 1 << 16)) is is_coloured
    os.close(ours)


def test_a_long_text_whole_on_request(tmp_path):
    text = "\n".join(f"line {i}" for i in range(40))
    path = written(tmp_path / "run.json", samples.case(verdict="fail", failure={"text": text}))
    assert "    line 20\n" not in report(path).stdout
    assert "    line 20\n" in report(path, "--full").stdout


def test_a_terminal_without_unicode_shows_escapes(failing):
    done = report(failing, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert r"    gr\xf6\xdfer \ud800" in done.stdout


@pytest.mark.parametrize("content", [None, "{", '{"schema_version": 3}'], ids=["missing", "no JSON", "version"])
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, content):
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    done = report(path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"shardproof: {path}: ")
    assert done.stderr.count("\n") == 1


def test_the_journal_of_an_incomplete_run_is_printed_with_exit_code_1(tmp_path):
    path = tmp_path / "run.json.partial"
    data = samples.journal(samples.case(id="a"), selected={"reference": ["a", "b"]}, reason="SIGTERM")
    path.write_text(json.dumps(data) + "\n")
    done = report(path)
    assert done.returncode == 1
    assert "\nINCOMPLETE: SIGTERM\nselected, but not run: reference 1\n" in done.stdout
    assert done.stdout.endswith("0 of 1 case that ran failed; 0 skipped; the run is INCOMPLETE\n")


def test_what_is_required_and_was_not_asked_is_said(tmp_path):
    needs = {"ACCUMULATION-1": "4 ranks", "INIT-8": "4 ranks"}
    path = written(tmp_path / "run.json", samples.case(), unasked={"reference": needs})
    line = "required of every implementation, not run: ACCUMULATION-1 (needs 4 ranks), INIT-8 (needs 4 ranks)"
    assert f"\nreference: {line}\n" in report(path).stdout


def test_what_ran_again_and_what_pytest_skipped_is_said(tmp_path):
    left_out = [{"id": "b", "implementation": "reference", "reason": "Skipped: on a whim"}]
    attempts = samples.case(verdict="fail"), samples.case(attempt=2)
    done = report(written(tmp_path / "run.json", *attempts, left_out=left_out))
    assert done.returncode == 0
    assert "\nskipped by pytest (Skipped: on a whim): reference 1\n" in done.stdout
    assert "\nrun again, only the last attempt counts: reference 1\n" in done.stdout
    assert "0 of 1 case that ran failed" in done.stdout


def test_an_unknown_option_is_exit_code_2_without_a_traceback():
    done = report("--case", "--row", "out/run.json")
    assert done.returncode == 2
    assert "unrecognized arguments: --row" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("cases", [1, 1000], ids=["at the flush", "while printing"])
def test_a_reader_that_stops_early_is_no_error(tmp_path, cases):
    """As under `| head`: the other end of the pipe is closed."""
    path = written(tmp_path / "run.json", *(samples.case(id=f"case {i} {'x' * 100}") for i in range(cases)))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "shardproof", "report", "--cases", str(path)]
    # An empty PYTHONUNBUFFERED is none: with one, nothing would be left for the flush.
    env = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_neither_torch_nor_pytest_is_loaded(failing):
    """A laptop without torch reads a run file: nothing but the standard library and shardproof itself is imported."""
    script = f"""
import sys
before = set(sys.modules)
from shardproof.__main__ import main
main(["report", {str(failing)!r}])
names = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print("foreign:", sorted(names - set(sys.stdlib_module_names) - {{"shardproof"}}))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, errors="replace")
    assert "foreign: []\n" in done.stdout, done.stderr
