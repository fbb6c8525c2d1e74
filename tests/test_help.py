"""`shardproof --help` and that of each command read as documentation, and README names each command."""

import re
import sys
from pathlib import Path

import pytest

from shardproof.__main__ import COMMANDS, USAGE, main
from tests.harness.inner import CASE, PYTHONPATH, QUIET, python

ROOT = Path(__file__).parents[1]

NAMES = re.findall(
    r"^  ([\w-]+)(?:  | *\n {11})", USAGE.partition("commands:\n")[2].partition("\n\n")[0], flags=re.MULTILINE
)

#: Those whose help argparse does not write.
OF_PYTEST = "run"


def help_of(name, capsys):
    with pytest.raises(SystemExit) as exit:
        main([name, "--help"])
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_the_commands_are_those_of_the_message_about_unknown_ones():
    assert sorted(NAMES) == sorted(COMMANDS)
    assert len(NAMES) > 5


def test_help_shows_how_the_commands_follow_each_other(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    examples = re.findall(r"^  shardproof (\w+) ", printed, flags=re.MULTILINE)
    assert examples[0] == "run" and set(examples) <= set(NAMES)
    assert max(map(len, printed.splitlines())) <= 110


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_has_each_command(name):
    assert re.search(rf"^\| `shardproof {name}\b", (ROOT / "README.md").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in NAMES if name != OF_PYTEST])
def test_each_command_says_what_it_does_and_what_each_argument_is(name, capsys):
    printed = help_of(name, capsys)
    description = printed.partition("\n\n")[2].partition("\n\n")[0]
    assert len(description) > 50
    # An argument without a text ends its line.
    assert not re.search(r"^  (-\S+( \S+)?|\S+)$\n(?! {10})", printed, flags=re.MULTILINE), printed


@pytest.mark.parametrize("name", ["report", "gate", "expectations", "findings", "merge", "plan", "implementations"])
def test_a_command_has_examples(name, capsys):
    assert f"examples:\n  shardproof {'run' if name == 'expectations' else name}" in help_of(name, capsys)


def test_the_help_of_run_precedes_that_of_pytest(monkeypatch, capsys):
    # The command changes both, for pytest.
    monkeypatch.setenv("PYTEST_PLUGINS", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(pytest, "main", lambda arguments: print("pytest's") or 0)
    assert main(["run", "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: shardproof run ") and printed.endswith("\npytest's\n")


@pytest.mark.parametrize("name", NAMES)
def test_a_help_needs_no_package(tmp_path, name):
    """It is read before anything is installed; -S leaves out the folder in which packages are."""
    done = python("-S", "-m", "shardproof", name, "--help", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0 and done.stdout.startswith(f"usage: shardproof {name}"), done.stderr


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        (
            "suites/test_cliping.py",
            "suites/test_cliping.py: the packaged suites have no such file; did you mean suites/tes",
        ),
        ("suites/clip", "the packaged suites have no such file; there are"),
        (
            "suites/test_clipping.py::test_empty_shard[ddp-w2]",
            "has no case test_empty_shard; did you mean test_empty_sh",
        ),
        ("test_clipping.py", "test_clipping.py: there is no such file here; the packaged one is suites/test_cl"),
    ],
)
def test_a_suite_that_is_not_there(tmp_path, monkeypatch, capsys, argument, told):
    monkeypatch.chdir(tmp_path)
    assert main(["run", argument, "--impl", "ddp"]) == pytest.ExitCode.USAGE_ERROR
    said = capsys.readouterr().err
    assert told in said and said.startswith("ERROR: ") and said.count("\n") == 1


@pytest.mark.parametrize("item", ["", "::test_case"])
def test_a_file_of_ones_own(tmp_path, monkeypatch, capsys, item):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_mine.py").write_text(CASE.format(body="pass"))
    assert main(["run", f"test_mine.py{item}", "--impl", "ddp"]) == pytest.ExitCode.USAGE_ERROR
    said = capsys.readouterr().err
    assert said == (
        "ERROR: test_mine.py: no file of the packaged suites; cases of your own run by `pytest -p shardproof.plugin "
        "test_mine.py`\n"
    )


# What `shardproof run` leaves to pytest's options

LISTED = ("suites/test_compiled.py", "--impl", "reference", "--device", "cpu", "--collect-only", "-q")


@pytest.mark.parametrize(
    "given",
    [["-p", "no:cacheprovider"], pytest.param(["-pno:cacheprovider"], marks=pytest.mark.nightly)],
    ids=["apart", "together"],
)
def test_pytest_without_its_cache(tmp_path, given):
    """The option for the place of the cache is the cache's own."""
    python("-m", "shardproof", "run", *given, *LISTED, cwd=tmp_path, code=0)
    assert not [*tmp_path.iterdir()], "nothing is written where the run began"


@pytest.mark.parametrize("command", [("shardproof", "run"), ("pytest", *QUIET)], ids=["run", "pytest"])
@pytest.mark.parametrize("device", [(), ("--simulate", "1024")], ids=["", "simulated"])
def test_a_typo_is_answered_before_torch_is_imported(tmp_path, command, device):
    """Neither this process nor the forkserver, which would import it meanwhile, spends seconds on it."""
    (tmp_path / "stub/torch").mkdir(parents=True)
    imported = tmp_path / "imported"
    stub = f"open({str(imported)!r}, 'w').close()\nraise ImportError('torch was imported')\n"
    (tmp_path / "stub/torch/__init__.py").write_text(stub)
    (tmp_path / "test_inner.py").write_text(CASE.format(body="pass"))
    path = f"{tmp_path / 'stub'}:{PYTHONPATH}"
    done = python("-m", *command, "--impl", "ddp,refrence", *device, cwd=tmp_path, PYTHONPATH=path)
    assert not imported.exists(), "torch was imported"
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "ERROR: unknown implementation 'refrence': did you mean reference" in done.stderr
