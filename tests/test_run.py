"""The command ``shardproof run``: what it leaves to pytest's options."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import warm
from tests.harness.inner import CASE, PYTHONPATH, QUIET

LISTED = ("suites/test_compiled.py", "--impl", "reference", "--device", "cpu", "--collect-only", "-q")


@pytest.mark.parametrize("given", [["-p", "no:cacheprovider"], ["-pno:cacheprovider"]], ids=["apart", "together"])
def test_pytest_without_its_cache(tmp_path, monkeypatch, given):
    """The option for the place of the cache is the cache's own."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    command = [warm.python(), "-m", "shardproof", "run", *given, *LISTED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [*tmp_path.iterdir()], "nothing is written where the run began"


@pytest.mark.parametrize("command", [("shardproof", "run"), ("pytest", *QUIET)], ids=["run", "pytest"])
@pytest.mark.parametrize("device", [(), ("--simulate", "1024")], ids=["", "simulated"])
def test_a_typo_is_answered_before_torch_is_imported(tmp_path, monkeypatch, command, device):
    """Neither this process nor the forkserver, which would import it meanwhile, spends seconds on it."""
    (tmp_path / "stub/torch").mkdir(parents=True)
    imported = tmp_path / "imported"
    stub = f"open({str(imported)!r}, 'w').close()\nraise ImportError('torch was imported')\n"
    (tmp_path / "stub/torch/__init__.py").write_text(stub)
    (tmp_path / "test_inner.py").write_text(CASE.format(body="pass"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'stub'}:{PYTHONPATH}")
    options = ["--impl", "ddp,refrence", *device]
    done = subprocess.run(
        [sys.executable, "-m", *command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert not imported.exists(), "torch was imported"
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "ERROR: unknown implementation 'refrence': did you mean reference" in done.stderr
