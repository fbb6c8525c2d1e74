"""What a command costs on a machine that does other things as well: seconds of a core, and the time on quiet cores.

    python -m benchmarks cores [--cores 2] COMMAND [ARGUMENT ...]

Runs the command and prints the seconds of a core that it and all its descendants used, those that became orphans too,
and an estimate of the seconds that it would take alone on that many cores. Twenty times a second it looks how many
threads of the command could run. The estimate is the time in which none could, the time of a core that was used while
exactly one could, and of what was used while several could, its share of each core. A machine that is busy prolongs the
latter two, but it changes neither what they use nor the time in which nothing can run. The exit code is the command's.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import os
import pathlib
import resource
import sys
import threading
import time
from collections.abc import Iterator

_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")
_PERIOD = 0.05


class Sampler(threading.Thread):
    """Looks at the descendants of this process until it is stopped.

    Args:
        cores: the number of cores that the command is to have.

    Attributes:
        seconds: by how many threads could run, up to the number of cores, the seconds in which they could.
        used: the same for the seconds of a core that all of them used.
        stopped: set it to end the thread.
    """

    def __init__(self, cores: int) -> None:
        super().__init__(daemon=True)
        self.seconds: collections.Counter[int] = collections.Counter()
        self.used: collections.Counter[int] = collections.Counter()
        self.stopped = threading.Event()
        self._cores = cores

    def run(self) -> None:
        """Called by the thread."""
        before = self._look()
        while not self.stopped.wait(_PERIOD):
            now = self._look()
            count = min(before[0], self._cores)
            self.seconds[count] += now[2] - before[2]  # type: ignore[assignment]
            self.used[count] += max(0.0, now[1] - before[1])  # type: ignore[assignment]
            before = now

    def estimate(self, used: float) -> float:
        """The seconds on quiet cores of a command that used ``used`` seconds of a core in all."""
        # What ended between two looks is in no sample.
        scale = used / max(sum(self.used.values()), 1e-9)
        return self.seconds[0] + sum(scale * self.used[count] / count for count in range(1, self._cores + 1))

    def _look(self) -> tuple[int, float, float]:
        """The threads that could run, the seconds of a core that have been used, and the time."""
        running, used = 0, 0
        for process in _descendants(os.getpid()):
            if fields := _fields(process):
                used += sum(map(int, fields[11:15]))
                threads = pathlib.Path(f"/proc/{process}/task").glob("[0-9]*")
                running += sum(_fields(f"{process}/task/{thread.name}")[:1] in (["R"], ["D"]) for thread in threads)
        return running, used / _TICKS, time.monotonic()


def _descendants(root: int) -> Iterator[str]:
    children: dict[str, list[str]] = collections.defaultdict(list)
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        if fields := _fields(path.name):
            children[fields[1]].append(path.name)
    pending = [str(root)]
    while pending:
        found = children[pending.pop()]
        yield from found
        pending += found


def _fields(which: str) -> list[str]:
    """What the kernel says of a process or thread, from its state on; nothing of one that has ended."""
    try:
        return pathlib.Path(f"/proc/{which}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def main() -> int:
    """Run the command and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.cores < 1 or not options.command:
        parser.error("give a command, and one core or more")
    # Processes whose parent ends become children of this one, and their seconds are not lost.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sampler, started = Sampler(options.cores), time.monotonic()
    process = os.posix_spawnp(options.command[0], options.command, os.environ)
    sampler.start()
    code, seconds = 0, 0.0
    while True:
        try:
            ended, status = os.wait()
        except ChildProcessError:
            break
        if ended == process:
            code, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - started
            sampler.stopped.set()
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = spent.ru_utime + spent.ru_stime
    print(
        f"{seconds:.0f} s here, {used:.0f} s of a core; nothing could run in {sampler.seconds[0]:.0f} s; "
        f"about {sampler.estimate(used):.0f} s alone on {options.cores} cores"
    )
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
