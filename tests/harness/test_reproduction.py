"""The line that reproduces a failure, pasted into a shell that is in another directory."""

import os
import shlex
import subprocess

import pytest

from tests.harness.inner import PYTHONPATH, ROOT, python

pytestmark = pytest.mark.sampled

#: Fails on the second of two ranks, and shows in what.
FAILS = """
import os
import pytest
from shardproof.testing import deadline, world
@world(2)
def test_case(rank):
    assert rank.index == 0, "the failure"
"""

ADAPTER = """
from shardproof.harness.adapters.reference import ReferenceAdapter
class Broken(ReferenceAdapter):
    name = "broken"
    def backward(self, loss):
        (loss * 2).backward()
"""

NAMES_US = 'pytest_plugins = ["shardproof.plugin"]\n'


@pytest.fixture
def start(tmp_path):
    """Run a module of this Python in a directory of its own, and return what it printed."""

    return lambda *arguments, cwd=None: python("-m", *arguments, cwd=cwd or tmp_path, code=1).stdout


def line_of(printed):
    """The one command that a run printed; all its failures are one case."""
    (line,) = {line for line in printed.splitlines() if line.startswith("reproduce: ")}
    return line.removeprefix("reproduce: ")


def pasted(line):
    """Paste a line into a shell that knows nothing of the run, and return what the one case that ran printed."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(["bash", "-c", line], cwd="/", env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout and "passed" not in done.stdout.splitlines()[-1], done.stdout
    assert line_of(done.stdout) == line, "the line reproduces itself"
    return done.stdout


def options_of(line):
    """The words after the node id."""
    words = shlex.split(line.removesuffix(")"))
    return words[next(i for i, word in enumerate(words) if "::" in word) + 1 :]


@pytest.mark.nightly
def test_a_case_of_a_project_in_a_directory_below(start, tmp_path):
    folder = tmp_path / "a folder" / "cases"
    folder.mkdir(parents=True)
    (tmp_path / "conftest.py").write_text(NAMES_US)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_own.py").write_text(FAILS)
    printed = start("pytest", "cases", "--impl", "ddp", "--device", "cpu", cwd=tmp_path / "a folder")
    line = line_of(printed)
    assert "'cases/test_own.py::test_case[ddp-w2]'" in line, "the node id is a folder/cases/..., from the root"
    assert options_of(line) == ["--impl", "ddp", "--device", "cpu"]
    assert "the failure" in pasted(line)


@pytest.mark.nightly
def test_a_case_of_the_suites_in_a_clone_with_an_adapter_of_the_current_directory(start, tmp_path):
    (tmp_path / "mine.py").write_text(ADAPTER)
    suite = ROOT / "suites/test_training.py"
    options = ["-k", "test_single_unit and 16x15-15x8", "--impl", "mine:Broken", "--device", "cpu", "--world", "2"]
    line = line_of(start("pytest", suite, *options))
    assert options_of(line) == ["--impl", "mine:Broken", "--device", "cpu"]
    assert "gradient of " in pasted(line)


@pytest.mark.parametrize("command", ["script", "module"])
def test_a_package_of_the_current_directory_that_is_installed_too(tmp_path, command):
    """A command of pip finds what is installed, and ``python -m`` what is here. Run and line test the same file."""
    here, installed, scripts = (tmp_path / name for name in ("here", "installed", "scripts"))
    for folder in (here, installed, scripts):
        folder.mkdir()
    (here / "mine.py").write_text(ADAPTER.replace("Broken", "Mine").replace("loss * 2", "loss * 3"))
    (installed / "mine.py").write_text(ADAPTER.replace("Broken", "Mine"))
    (scripts / "shardproof").write_text("import sys\nfrom shardproof.__main__ import console\nsys.exit(console())\n")
    start = {"script": [scripts / "shardproof"], "module": ["-m", "shardproof"]}[command]
    options = ["run", "suites/test_training.py", "-k", "test_single_unit and 16x15-15x8", "--impl", "mine:Mine"]
    path = os.pathsep.join([PYTHONPATH, str(installed)])
    printed = python(*start, *options, "--device", "cpu", "--world", "2", cwd=here, code=1, PYTHONPATH=path).stdout
    again = pasted(line_of(printed))
    file = (installed if command == "script" else here) / "mine.py"
    for one in (printed, again):
        assert f"shardproof: mine:Mine: {file} drives " in one and "fsdp_impl/per_parameter/construct.py" in one, one


#: Options of a run, and whether the line has them too.
OPTIONS = {
    "none": ([], True),
    "kept": (["--deadline", "55.5", "--expectations", "ddp.toml", "--check-collectives", "--isolate"], True),
    "dropped": (["--world", "2", "--effort", "quick", "-n", "2", "--report", "run.json"], False),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_that_mattered(start, tmp_path, name):
    given, are_kept = OPTIONS[name]
    (tmp_path / "ddp.toml").write_text("")
    (tmp_path / "test_own.py").write_text(FAILS)
    options = ["-p", "shardproof.plugin", "--impl", "ddp,reference", "--device", "cpu", "-k", "ddp", *given]
    line = line_of(start("pytest", "test_own.py", *options))
    assert options_of(line) == ["--impl", "ddp", "--device", "cpu", *(given if are_kept else [])]
    assert "the failure" in pasted(line)


def test_options_of_pytest_that_decide_what_is_collected(start, tmp_path):
    """Another configuration, root directory and import mode, a plugin, and a setting."""
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "own.ini").write_text("[pytest]\npython_functions = check_*\n")
    (tmp_path / "their_plugin.py").write_text("def pytest_report_header(): return 'their plugin is here'\n")
    (root / "checks.py").write_text(FAILS.replace("test_case", "check_case"))
    given = ["-c", "own.ini", "--rootdir", "root", "--import-mode=importlib", "-o", "python_files=checks.py"]
    plugins = ["-p", "shardproof.plugin", "-p", "their_plugin"]
    printed = start("pytest", "root", *given, *plugins, "--impl", "ddp", "--device", "cpu")
    again = pasted(line_of(printed))
    assert "the failure" in again and "their plugin is here" in again


def test_a_project_with_options_of_the_same_names(start, tmp_path):
    theirs = "def pytest_addoption(parser):\n    for name in ('device', 'deadline'): parser.addoption(f'--{name}')\n"
    (tmp_path / "conftest.py").write_text(NAMES_US + theirs)
    (tmp_path / "test_own.py").write_text(FAILS)
    line = line_of(start("pytest", "--impl", "ddp", "--shardproof-device", "cpu", "--shardproof-deadline", "50"))
    assert options_of(line) == ["--impl", "ddp", "--shardproof-device", "cpu", "--shardproof-deadline", "50"]
    assert "the failure" in pasted(line)


def test_a_nightly_case(start, tmp_path):
    (tmp_path / "conftest.py").write_text(NAMES_US)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -m 'not nightly'\nmarkers =\n    nightly: slow\n")
    (tmp_path / "test_own.py").write_text(FAILS.replace("@world", "@pytest.mark.nightly\n@world"))
    line = line_of(start("pytest", "-m", "nightly", "--impl", "ddp", "--device", "cpu"))
    assert options_of(line) == ["--impl", "ddp", "--device", "cpu", "-m", "nightly"]
    assert "the failure" in pasted(line)


def test_an_id_that_the_shell_would_change(start, tmp_path):
    (tmp_path / "conftest.py").write_text(NAMES_US)
    ids = "@pytest.mark.parametrize('n', [1], ids=['it\\'s $HOME `x` \"y\" * !'])\n@world"
    (tmp_path / "test_own.py").write_text(FAILS.replace("@world", ids).replace("(rank)", "(rank, n)"))
    assert "the failure" in pasted(line_of(start("pytest", "--impl", "ddp", "--device", "cpu")))


def test_the_run_file_has_the_line_and_the_report_prints_it(start, tmp_path):
    (tmp_path / "test_own.py").write_text(FAILS)
    options = ["--impl", "ddp", "--device", "cpu", "--report", "run.json"]
    line = line_of(start("pytest", "-p", "shardproof.plugin", *options))
    done = python("-m", "shardproof", "report", "run.json", cwd=tmp_path)
    assert f"  reproduce: {line}\n" in done.stdout
