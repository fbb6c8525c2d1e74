"""How fast verdicts come: trivial two-rank cases on the CPU, through pytest, with the left-over checks on.

    python benchmarks/throughput.py [--cases 500] [--world 2]

Prints the seconds from the command's start to the first verdict, and the cases a second from
there on. Both are measured from outside, by the run that a user would start.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]

CASES = """
import pytest
from harness import world

@world({world})
@pytest.mark.parametrize("number", range({cases}))
def test_trivial(rank, number):
    assert rank.world_size == {world}
"""


def main() -> None:
    """Run the cases once and print the two figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--world", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "test_trivial.py")
        path.write_text(CASES.format(world=options.world, cases=options.cases))
        moments = verdict_moments(path)
    assert len(moments) == options.cases, f"{len(moments)} verdicts of {options.cases} cases"
    rate = (len(moments) - 1) / (moments[-1] - moments[0])
    print(f"{options.cases} cases of {options.world} ranks on {os.cpu_count()} cores")
    print(f"first verdict after {moments[0]:.2f} s, then {rate:.0f} cases a second")


def verdict_moments(path: pathlib.Path) -> list[float]:
    """Seconds from the command's start at which each case's PASSED was printed."""
    command = [sys.executable, "-u", "-m", "pytest", "-p", "no:cacheprovider", "-p", "harness.plugin", "-v"]
    command += ["--impl", "ddp", "--device", "cpu", "--rootdir", str(path.parent), str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    moments = []
    with subprocess.Popen(command, cwd=path.parent, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "PASSED" in line:
                moments.append(time.monotonic() - started)
    if process.returncode:
        raise SystemExit(f"pytest ended with {process.returncode}: {' '.join(command)}")
    return moments


if __name__ == "__main__":
    main()
