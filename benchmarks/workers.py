"""What pytest-xdist's workers bring on a host: the same cases with and without them, verdicts compared.

    python benchmarks/workers.py --workers 4 [--impl reference] [--device cuda] [suites/test_training.py ...]

Prints the seconds from each command's start to its first verdict and from there to its last, the
quotient of the latter, and every case whose verdicts differ; exits with 1 if any does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile

from moments import line_moments

ROOT = pathlib.Path(__file__).parents[1]

#: How ``pytest -v`` prints a verdict, with the worker's name before it or the share of the cases behind it.
VERDICT = r"^(?=.*::).*\b(PASSED|FAILED|SKIPPED|XFAIL|ERROR)\b"


@dataclasses.dataclass(frozen=True)
class Timed:
    """One run: seconds to the first verdict and from there to the last, and the verdicts by case."""

    started: float
    working: float
    verdicts: dict[str, str]


def main() -> None:
    """Run twice and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--impl", default="reference")
    parser.add_argument("--device", default="auto")
    parser.add_argument("cases", nargs="*", default=["suites"])
    options = parser.parse_args()
    cases = ["--impl", options.impl, "--device", options.device, *options.cases]
    runs = {workers: timed(cases, workers=workers) for workers in (0, options.workers)}
    for workers, run in runs.items():
        print(
            f"-n {workers}: first verdict after {run.started:.1f} s, {len(run.verdicts)} cases in {run.working:.1f} s"
        )
    alone, together = runs.values()
    print(f"-n {options.workers} is {alone.working / together.working:.2f} times as fast as -n 0, once started")
    names = sorted(alone.verdicts.keys() | together.verdicts.keys())
    found = [(name, alone.verdicts.get(name), together.verdicts.get(name)) for name in names]
    differing = [f"{name}: {one} and {other}" for name, one, other in found if one != other]
    print("\n".join(differing) or "the verdicts are the same")
    raise SystemExit(bool(differing))


def timed(cases: list[str], *, workers: int) -> Timed:
    """Run the cases in so many workers; cases may fail, pytest must end as with tests run."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "run.json")
        command = [sys.executable, "-u", "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", str(workers)]
        command += ["--report", str(report), *cases]
        # Cases may fail, as long as all were run.
        moments = line_moments(command, pattern=VERDICT, folder=ROOT, environment={"COLUMNS": "200"}, fine=(0, 1))
        found = json.loads(report.read_text())["cases"]
    verdicts = {f"{case['id']} of {case['implementation']}": case["verdict"] for case in found}
    return Timed(moments[0], moments[-1] - moments[0], verdicts)


if __name__ == "__main__":
    main()
