"""The slowest tests: the seconds of a core that each takes, with its reason.

Usage: ``python benchmarks/slowest_tests.py [--first N] [arguments of pytest]``, from the root of a clone. Runs the
tests one after another, because what two workers do at once cannot be told apart, and prints the N (20) that cost most.
The seconds are those of the test's own process and of all processes that it starts, with its fixtures: a fixture that
several tests share is counted for the first of them. The servers that all tests share are started before. The exit code
is 1 if a test of more than ``LIMIT`` seconds has no mark ``slow`` with the reason, or if a test failed.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import pathlib
import sys
from collections.abc import Generator

import pytest

#: Seconds of a core above which a test needs a reason, on a machine that does nothing else.
LIMIT = 5.0

_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass
class Cost:
    """What one test costs."""

    test: str
    seconds: float
    reason: str


class Meter:
    """Measures each test of a run."""

    def __init__(self) -> None:
        self.costs: list[Cost] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        """Start what all tests share, which would be counted for the first test that uses it."""
        # From the clone, whose root pytest has put on the path.
        from shardproof.harness.worlds import forkserver
        from tests import warm

        warm.python()
        forkserver.start()
        process = forkserver.context().Process(target=int)
        forkserver.spawn(process, "a process")
        process.join()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note the seconds that the processes have used during a test."""
        before = seconds()
        try:
            return (yield)
        finally:
            marks = [mark.args[0] for mark in item.iter_markers("slow")]
            self.costs.append(Cost(item.nodeid, seconds() - before, marks[0] if marks else ""))


def seconds() -> float:
    """Return the seconds of a core that this process and its descendants have used, those that have ended too."""
    children: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(") ")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(path.name))
        used[int(path.name)] = sum(map(int, fields[11:15])) / _TICKS
    total, pending = 0.0, [os.getpid()]
    while pending:
        process = pending.pop()
        total += used.get(process, 0.0)
        pending += children.get(process, [])
    return total


def table(costs: list[Cost], first: int) -> list[str]:
    """Return the lines of the slowest tests and of the sum."""
    ranked = sorted(costs, key=lambda cost: -cost.seconds)
    lines = [f"{cost.seconds:6.1f} s  {cost.test}\n          {cost.reason or '-'}" for cost in ranked[:first]]
    return [*lines, f"{sum(cost.seconds for cost in costs):6.1f} s  in all, {len(costs)} tests"]


def main() -> int:
    """Run the tests and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=20, metavar="N", help="how many tests to print")
    chosen, arguments = parser.parse_known_args()
    # Processes whose parent ends become children of this one, and their seconds are not lost.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    meter = Meter()
    code = int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[meter]))
    print("", *table(meter.costs, chosen.first), sep="\n")
    unexplained = [cost.test for cost in meter.costs if cost.seconds > LIMIT and not cost.reason]
    for test in unexplained:
        print(f"no reason: {test}", file=sys.stderr)
    return code or int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
