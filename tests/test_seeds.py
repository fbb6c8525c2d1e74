"""docs/seeds.md says what the cases' marks say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_is_up_to_date():
    done = subprocess.run(
        [sys.executable, "docs/make_seeds.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
