"""The live line: on a terminal what is done, failed, running and left; anywhere else nothing."""

import os
import pty
import re
import subprocess
import sys
import types

import pytest

from shardproof.harness.plugin import live
from tests.harness.inner import PYTHONPATH, QUIET

pytestmark = pytest.mark.sampled

CASES = """
from shardproof.testing import world
@world(2)
def test_passes(rank):
    pass
@world(3)
def test_fails(rank):
    raise ValueError("on purpose")
def test_of_another_kind():
    pass
"""

#: How many tests have ended, how many have failed, the time left, and those that run.
LINE = re.compile(r"(\d)/3 (\d) failed (\S+) left([^\r\n]*)")


@pytest.fixture
def on_terminal(tmp_path, monkeypatch):
    """Run pytest on the cases in a pseudo terminal of 120 columns, and return what it shows."""
    (tmp_path / "test_inner.py").write_text(CASES)
    monkeypatch.delenv("NO_COLOR", raising=False)
    environment = {"PYTHONPATH": PYTHONPATH, "TERM": "xterm", "COLUMNS": "120"}

    def on_terminal(*options):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "pytest", *QUIET, "--impl", "ddp", "--device", "cpu", *options]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **environment}, **streams)
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:
            pass  # the other end is closed
        finally:
            os.close(ours)
        assert process.wait(timeout=60) == 1, shown.decode()
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())

    return on_terminal


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one-process", "workers"])
def test_a_terminal_shows_how_far_the_run_is(on_terminal, options):
    shown = on_terminal("--world", "2,3", *options)
    assert shown.startswith("shardproof: importing torch and collecting the cases for ddp on worlds of 2,3 ranks\r\n")
    assert bool(options) or "shardproof: 2 cases of ddp; ranks: 2, 3; device: cpu; effort: full" in shown
    lines = LINE.findall(shown)
    assert ("0", "0") in {(done, failed) for done, failed, _, _ in lines}
    running = " ".join(running for *_, running in lines)
    assert set(re.findall(r"w\d ddp test_\w+", running)) == {"w2 ddp test_passes", "w3 ddp test_fails"}
    assert ("3", "1") in {(done, failed) for done, failed, _, _ in lines}
    assert any(re.fullmatch(r"\d:\d\d:\d\d", left) for _, _, left, _ in lines), "the time left is never known"
    assert "FAILED test_inner.py::test_fails[ddp-w3] fail: ValueError: on purpose" in shown
    assert "[100%]" not in shown and "test_inner.py .F" not in shown, "pytest's dots are in the way"
    assert "1 failed, 2 passed" in shown.splitlines()[-1]
    assert "left" not in shown.rpartition("= FAILURES =")[2], "the line is still there"


def registered(*, is_terminal=True, verbose=0, capture="fd", **attributes):
    """Whether a run with these options has a line."""
    found = []
    reporter = types.SimpleNamespace(isatty=lambda: is_terminal)
    manager = types.SimpleNamespace(getplugin=lambda name: reporter, register=lambda *given: found.append(given))
    option = types.SimpleNamespace(verbose=verbose, capture=capture)
    live.register(types.SimpleNamespace(pluginmanager=manager, option=option, **attributes))
    return bool(found)


@pytest.fixture
def without_ci(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(
    "options",
    [{"is_terminal": False}, {"verbose": -1}, {"verbose": 1}, {"capture": "no"}, {"workerinput": {}}],
    ids=["no-terminal", "quiet", "verbose", "uncaptured", "worker"],
)
def test_runs_without_a_line(without_ci, options):
    assert registered()
    assert not registered(**options)


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("BUILD_NUMBER", "7"), ("TERM", "dumb")])
def test_surroundings_without_a_line(without_ci, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert not registered()


def test_without_rich_there_is_no_line(without_ci, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert not registered()


@pytest.mark.parametrize(
    ("nodeid", "label"),
    [
        ("suites/test_a.py::test_x[torch.fsdp-w4]", "w4 torch.fsdp test_x"),
        ("suites/test_a.py::test_x[reference-w2-inf-None]", "w2 reference test_x[inf-None]"),
        ("suites/test_a.py::test_x[mod:Adapter-w2-a]", "w2 mod:Adapter test_x[a]"),
        ("tests/test_a.py::test_of_another_kind", "test_of_another_kind"),
    ],
)
def test_a_case_is_named_in_a_few_words(nodeid, label):
    assert live.label_of(nodeid) == label
