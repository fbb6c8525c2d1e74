"""Cases ask for no more than they need: an implementation that declares nothing is asked most of what is for any."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

from tests import warm
from tests.harness.inner import PYTHONPATH

ROOT = Path(__file__).parents[1]


def test_an_adapter_that_declares_nothing_is_asked_two_thirds_of_what_is_for_any(tmp_path):
    contract = (ROOT / "docs/contract.md").read_text()
    marked = set(re.findall(r"^\| ([A-Z]+-\d+) \| any \|", contract, flags=re.MULTILINE))
    command = [warm.python(), "-m", "pytest", "suites", "--co", "-q", "-p", "no:cacheprovider", "-p", "tests.minimal"]
    command += ["--impl", "tests.minimal:Minimal", "--device", "cpu", "--world", "1,2,4"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "ASKED": str(tmp_path / "asked")}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    asked = set(json.loads((tmp_path / "asked").read_text()))
    assert len(marked) > 20
    assert 3 * len(marked & asked) >= 2 * len(marked), f"not asked: {sorted(marked - asked)}"
