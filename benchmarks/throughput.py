"""How fast verdicts come, and whether ranks grow: trivial cases through pytest, with the left-over checks on.

    python benchmarks/throughput.py [--cases 500] [--world 2] [--device cpu]

Prints the seconds from the command's start to the first verdict, the cases a second from there on,
and the median resident memory of a rank and the device memory in use, in the second and in
the last quarter of the cases. All is measured on the run that a user would start.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import tempfile

from moments import line_moments

ROOT = pathlib.Path(__file__).parents[1]

CASES = """
import os
import pytest
import torch
from shardproof.testing import world

PAGE = os.sysconf("SC_PAGE_SIZE")

@world({world})
@pytest.mark.parametrize("number", range({cases}))
def test_trivial(rank, number):
    assert rank.world_size == {world}
    if rank.index == 0 and number % 10 == 0:
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * PAGE
        device = torch.cuda.memory_reserved() if rank.device.type == "cuda" else 0
        with open({log!r}, "a") as log:
            log.write(f"{{resident}} {{device}}\\n")
"""


def main() -> None:
    """Run the cases once and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, log = pathlib.Path(folder, "test_trivial.py"), pathlib.Path(folder, "memory")
        path.write_text(CASES.format(world=options.world, cases=options.cases, log=str(log)))
        moments = verdict_moments(path, options.device)
        samples = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    assert len(moments) == options.cases, f"{len(moments)} verdicts of {options.cases} cases"
    rate = (len(moments) - 1) / (moments[-1] - moments[0])
    print(f"{options.cases} cases of {options.world} ranks on {options.device}, {os.cpu_count()} cores")
    print(f"first verdict after {moments[0]:.2f} s, then {rate:.0f} cases a second")
    for name, values in zip(("resident", "device"), zip(*samples, strict=True), strict=True):
        second, last = (statistics.median(quarter(values, which)) / 2**20 for which in (1, 3))
        change = last / second - 1 if second else 0.0
        print(f"{name} memory of rank 0: {second:.1f} MiB in the second quarter, {last:.1f} in the last, {change:+.2%}")


def quarter(values: tuple[int, ...], which: int) -> tuple[int, ...]:
    """The values of one quarter of the run, from 0."""
    return values[which * len(values) // 4 : (which + 1) * len(values) // 4]


def verdict_moments(path: pathlib.Path, device: str) -> list[float]:
    """Seconds from the command's start at which each case's PASSED was printed."""
    command = [
        sys.executable,
        "-u",
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "shardproof.plugin",
        "-v",
    ]
    command += ["--impl", "ddp", "--device", device, "--rootdir", str(path.parent), str(path)]
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return line_moments(command, pattern="PASSED", folder=path.parent, environment=environment)


if __name__ == "__main__":
    main()
