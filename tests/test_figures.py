"""Figures in documents are what the command beside them prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shardproof.harness.parity import numerics

ROOT = Path(__file__).parents[1]


def test_the_margins_of_the_tolerances_are_those_of_the_published_runs():
    published = sorted(map(str, (ROOT / "reports/published").glob("*.gz")))
    command = [sys.executable, ROOT / "benchmarks/margins.py", *published]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed[-1] in " ".join(numerics.__doc__.split())
