"""Where the time of a run goes, on this machine: start-up, cases a second, seconds a chapter, activities of the ranks.

    python -m benchmarks harness [--impl reference] [--device cpu] [--world 2,4] [suites/test_training.py ...]

Further arguments are passed to pytest. Prints the seconds from the command's start to the first verdict, the cases a
second from there on, a table of the chapters with the items that ran and their seconds, and the shares of the ranks'
time: training the sharded run, replaying the steps on the baseline and the oracle, comparing, waiting for other ranks
in the harness's exchanges, sharding models, and looking for left-overs, garbage collection included.
"""

import argparse
import collections
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from shardproof.runfile import Run, load_run  # noqa: E402

#: How ``pytest -v`` prints a verdict on a case that ran.
VERDICT = r"^(?=.*::).*\b(PASSED|FAILED|XFAIL|ERROR)\b"


def main() -> None:
    """Run the suites once and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", default="reference")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--world", default="1,2,4")
    options, further = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "run.json")
        command = [sys.executable, "-m", "pytest", *(further or ["suites"]), "-v", "-p", "no:cacheprovider"]
        command += ["--impl", options.impl, "--device", options.device, "--world", options.world, "--report", report]
        moments = verdict_moments(list(map(str, command)))
        run = load_run(report)
    print(f"{options.impl} on {options.device}, worlds {options.world}, {os.cpu_count()} cores")
    rate = (len(moments) - 1) / max(moments[-1] - moments[0], 1e-9)
    print(f"first verdict after {moments[0]:.1f} s; {len(moments)} items in {moments[-1]:.0f} s, {rate:.1f} a second")
    print_chapters(run)
    print_activities(run)


def verdict_moments(command: list[str]) -> list[float]:
    """Seconds from the start of a pytest command at which each verdict on a case that ran was printed."""
    started = time.monotonic()
    moments = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if re.search(VERDICT, line):
                moments.append(time.monotonic() - started)
    if process.returncode not in (0, 1) or not moments:
        raise SystemExit(f"pytest ended with {process.returncode}: {' '.join(command)}")
    return moments


def print_chapters(run: Run) -> None:
    """Print the items that ran and their seconds, by chapter."""
    items: collections.Counter[str] = collections.Counter()
    seconds: collections.Counter[str] = collections.Counter()
    for record in run.cases:
        if not record.verdict.is_skip:
            chapter = pathlib.Path(record.id.partition("::")[0]).stem.removeprefix("test_")
            items[chapter] += 1
            seconds[chapter] += record.seconds  # type: ignore[assignment]
    print(f"\n{'chapter':<16}{'items':>7}{'seconds':>9}{'an item':>9}")
    for chapter, total in seconds.most_common():
        print(f"{chapter:<16}{items[chapter]:>7}{total:>9.1f}{total / items[chapter]:>9.2f}")
    print(f"{'all':<16}{sum(items.values()):>7}{sum(seconds.values()):>9.1f}")


def print_activities(run: Run) -> None:
    """Print the shares of the ranks' time, by activity."""
    spent: collections.Counter[str] = collections.Counter()
    for record in run.cases:
        spent.update(record.spent)  # type: ignore[arg-type]
    total = sum(spent.values())
    print(f"\n{'activity':<16}{'seconds':>9}{'share':>7}")
    for activity, value in spent.most_common():
        print(f"{activity:<16}{value:>9.1f}{value / total:>7.0%}")


if __name__ == "__main__":
    main()
