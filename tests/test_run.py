"""The command ``shardproof run``: what it leaves to pytest's options."""

from __future__ import annotations

import subprocess

import pytest

from tests import warm
from tests.harness.inner import PYTHONPATH

LISTED = ("suites/test_compiled.py", "--impl", "reference", "--device", "cpu", "--collect-only", "-q")


@pytest.mark.parametrize("given", [["-p", "no:cacheprovider"], ["-pno:cacheprovider"]], ids=["apart", "together"])
def test_pytest_without_its_cache(tmp_path, monkeypatch, given):
    """The option for the place of the cache is the cache's own."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    command = [warm.python(), "-m", "shardproof", "run", *given, *LISTED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [*tmp_path.iterdir()], "nothing is written where the run began"
