"""Temporary directories: nothing of a killed run stays, and a full one is not blamed on the implementation."""

import os
import subprocess
import sys

import pytest

from shardproof.runfile import load_run
from tests.harness.inner import PYTHONPATH, QUIET, python

OWNER = """
import sys
from shardproof.harness.worlds import scratch
print(scratch.directory("world-").parent, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def own(tmp_path):
    """Start a process that has a temporary directory in ``tmp_path``; its path, and the process."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(tmp_path)}
    processes = []

    def start():
        command = [sys.executable, "-c", OWNER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, env=environment, text=True, **pipes)
        processes.append(process)
        return process.stdout.readline().strip(), process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_the_next_run_removes_what_a_killed_one_has_left(tmp_path, own):
    alive, first = own()
    killed, second = own()
    second.kill()
    second.wait()
    assert os.path.isdir(killed)
    own()
    assert os.path.isdir(alive) and not os.path.exists(killed)
    first.communicate("\n")
    assert not os.path.exists(alive), "a process that ends removes its own"


CASES = """
import os, pathlib, tempfile
import pytest
from shardproof.testing import world

@world(2)
@pytest.mark.parametrize("how", ["write", "die", "pass"])
def test_case(rank, how):
    if how == "write":
        rank.tmp_path.joinpath(str(rank.index)).write_bytes(bytes(1 << 22))
    if how == "die":
        pathlib.Path(tempfile.gettempdir(), str(rank.index)).write_bytes(bytes(1 << 22))
"""

FULL = "no space is left in {folder}; free some, or set TMPDIR to a directory with space\n"


@pytest.mark.nightly
def test_a_full_temporary_directory_is_not_the_fault_of_the_implementation(tmp_path, short_tmp):
    """On a file system of its own; the second case fills it for good."""
    folder = short_tmp
    unshare = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=3m none {folder}"
    if subprocess.run([*unshare, mount], check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    tmp_path.joinpath("test_inner.py").write_text(CASES)
    pytest_command = " ".join([sys.executable, "-m", "pytest", *QUIET, "--impl", "ddp", "--report", "run.json"])
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*unshare, f"{mount} && exec {pytest_command}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    cases = {case.parameters["how"]: case for case in load_run(tmp_path / "run.json").cases}
    verdicts = {how: str(case.verdict) for how, case in cases.items()}
    assert verdicts == {"write": "harness-error", "die": "harness-error", "pass": "pass"}
    for how in ("write", "die"):
        assert cases[how].failure.text.startswith(FULL.format(folder=folder))
        assert "No space left on device" in cases[how].failure.text


def test_a_temporary_directory_with_a_long_path_is_refused_in_one_line(tmp_path):
    """The path of the forkserver's socket has a limit."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    tmp_path.joinpath("test_inner.py").write_text(CASES)
    done = python("-m", "pytest", *QUIET, "--impl", "ddp", cwd=tmp_path, TMPDIR=str(folder))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    why = f"AF_UNIX path too long, in {folder}; set TMPDIR to a directory with space and a short path"
    assert done.stderr.strip() == f"ERROR: the forkserver cannot start: {why}"
