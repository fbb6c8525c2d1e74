"""The command ``shardproof findings``: lists the findings, runs their reproducers here, or writes a report of one."""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from shardproof import bug_report, commands, folders
from shardproof.commands import positive
from shardproof.door import printable
from shardproof.findings import FindingError, KnownFinding, load
from shardproof.reports.texts import table

DIFFERS = 1

_EPILOG = """\
examples:
  shardproof findings
  shardproof findings F-2 F-89
  shardproof findings --run F-2
  shardproof findings --run -n 4 > findings.txt
  shardproof findings --report F-2 -o report.md

exit codes: 0; 1 with --run, a finding differs from what its header says of the installed torch, or cannot be judged;
1 with --report, the program does not show the defect here, and nothing is written; 2 a finding cannot be read or
reported, or there is none of that name"""

#: The reproducers that run, each the leader of a group of processes.
_RUNNING: set[subprocess.Popen[bytes]] = set()

REPRODUCES, NOT, NOT_RUN, NOT_JUDGED = "reproduces", "does not reproduce", "not run", "cannot judge"


@dataclasses.dataclass(frozen=True)
class _Result:
    """What came of one finding: one of the words above, and why if it is one of the last two."""

    finding: KnownFinding
    said: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.finding.id:5}  {self.said}{': ' if self.why else ''}{printable(self.why)}"


def findings(arguments: Sequence[str]) -> int:
    """Print the index of the findings or, with ``--run``, what their reproducers show here; or write a report of one.

    The exit code is 0; 1 if a result differs from what is known or cannot be judged, or nothing shows what is to be
    reported; 2 for bad input, with one line on stderr.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.report is not None and (options.names or options.run or not options.output):
        parser.error("--report takes one finding, and -o FILE")
    try:
        chosen = _chosen(load(), [options.report] if options.report is not None else options.names)
        if options.report is not None:
            return _report(chosen[0], pathlib.Path(options.output), options.seconds)
    except FindingError as error:
        return commands.refuse(error)
    if options.run:
        return _run_all(chosen, processes=options.processes, seconds=options.seconds)
    rows = [[one.id, ", ".join(one.implementations), one.state, one.title] for one in chosen]
    print("\n".join(table([["id", "implementation", "state", "title"], *rows])))
    return 0


def _chosen(known: Sequence[KnownFinding], names: Sequence[str]) -> list[KnownFinding]:
    by_name = {one.id: one for one in known} | {one.path.stem: one for one in known}
    if unknown := [name for name in names if name not in by_name]:
        raise FindingError(f"there is no finding {unknown[0]!r}; `shardproof findings` lists them")
    return [by_name[name] for name in names] or list(known)


def _run_all(chosen: Sequence[KnownFinding], *, processes: int, seconds: int) -> int:
    """Run what can be run, some at a time; print a line for each at its end, and what differs at the end of all."""
    torch = _version("torch")
    results = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        try:
            for coming in concurrent.futures.as_completed([pool.submit(_result, one, seconds) for one in chosen]):
                results.append(coming.result())
                print(results[-1], flush=True)
        finally:  # after Ctrl-C or SIGTERM nothing is started, and nothing goes on
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_RUNNING):
                _end(process)
            signal.signal(signal.SIGTERM, before)
    counts = collections.Counter(one.said for one in results)
    print(f"torch {torch}: {', '.join(f'{count} {said}' for said, count in counts.items())}")
    differ = [one for one in results if torch and _differs(one, torch)]
    for one in sorted(differ, key=lambda one: one.finding.path):
        print(f"differs: {one}; its header says that it {NOT if one.said == REPRODUCES else REPRODUCES}")
    return DIFFERS if differ or counts[NOT_JUDGED] else 0


def _report(finding: KnownFinding, file: pathlib.Path, seconds: int) -> int:
    """Write a report once its program, as the report has it, has shown the defect."""
    bug_report.check(finding)
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, "repro.py")
        folders.write_file(program, finding.program)
        result, lines = _ran(finding, program, seconds)
    if result.said != REPRODUCES:
        print(f"{result}; no report of it", file=sys.stderr)
        return DIFFERS
    text = bug_report.write(finding, [line.replace(f"{folder}/", "") for line in lines], _version("torch") or "")
    try:
        made = folders.write_file(file, text)
    except folders.NotWritten as error:
        return commands.refuse(f"findings: {error}")
    print(printable(f"{result}, as pasted; {file}: {bug_report.lines_of(finding.program)} lines of program{made}"))
    return 0


def _differs(result: _Result, torch: str) -> bool:
    claim = result.finding.claim(torch)
    return claim is not None and result.said == (NOT if claim else REPRODUCES)


def _result(finding: KnownFinding, seconds: int) -> _Result:
    return _ran(finding, finding.path, seconds)[0]


def _ran(finding: KnownFinding, program: pathlib.Path, seconds: int) -> tuple[_Result, list[str]]:
    """Run a program of a finding if anything can; return what came of it, and the lines that it printed."""
    if finding.by_hand is not None:
        return _Result(finding, NOT_RUN, finding.by_hand), []
    if lacking := _lacking(finding):
        return _Result(finding, NOT_RUN, f"needs {' and '.join(lacking)}"), []
    lines = _output(program, finding.arguments, seconds)
    if finding.shows is None:
        why = f"its header does not say what shows the defect; it ended with {lines[-1]}"
        return _Result(finding, NOT_JUDGED, why), lines
    if re.search(finding.shows, "\n".join(lines), flags=re.MULTILINE):
        return _Result(finding, REPRODUCES), lines
    if lines[-1] == "exit code 0":
        return _Result(finding, NOT), lines
    why = f"{lines[-1]}, after {next(filter(None, lines[-2::-1]), 'no output')!r}"
    return _Result(finding, NOT_JUDGED, why), lines


def _lacking(finding: KnownFinding) -> list[str]:
    # Late: the index needs the standard library alone.
    from packaging.requirements import Requirement

    lacking = []
    for wanted in map(Requirement, ("torch", *finding.packages)):
        installed = _version(wanted.name)
        if installed is None or not wanted.specifier.contains(installed, prereleases=True):
            lacking.append(f"{wanted}{f' (here is {installed})' if installed else ''}")
    if finding.gpus > 0 and not lacking:
        import torch

        if (here := torch.cuda.device_count()) < finding.gpus:
            lacking.append(f"{finding.gpus} GPU{'s' if finding.gpus > 1 else ''} (here is {here})")
    return lacking


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(program: pathlib.Path, arguments: Sequence[str], seconds: int) -> list[str]:
    """Run a program until its end or the time limit; return what it printed, and how it ended as the last line."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile(dir=folder) as printed:
        process = subprocess.Popen(
            [sys.executable, str(program.resolve()), *arguments],
            cwd=folder,
            # Its ranks meet by files in this folder. Unbuffered, what they print at the same time would be mixed.
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder, "PYTHONUNBUFFERED": ""},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _RUNNING.add(process)
        try:
            ended = f"exit code {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            ended = "time limit"
        finally:
            _end(process)
            process.wait()
            _RUNNING.discard(process)
        printed.seek(0)
        return [*printed.read().decode(errors="replace").splitlines(), ended]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a reproducer and its ranks, which may wait for each other for ever, also where their parent has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser(
        "shardproof findings",
        description="List what the suites found in other implementations, from the folder findings/ of a clone. With "
        "--run, run the reproducers with the installed torch, those that need GPUs or other packages only where they "
        "are; say of each whether the defect is there, and at the end which differ from what their headers say. With "
        "--report, write one as a report for its maintainers, once its program has shown the defect here.",
        epilog=_EPILOG,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, such as F-2; all by default")
    parser.add_argument("--run", action="store_true", help="run their reproducers")
    parser.add_argument("--report", metavar="NAME", help="write a report of this finding, which is run first")
    parser.add_argument("-o", dest="output", metavar="FILE", help="the file of the report, in Markdown")
    parser.add_argument("-n", dest="processes", type=positive, default=1, metavar="N",
                        help="run N at a time (1); each has several ranks")  # fmt: skip
    parser.add_argument("--seconds", type=positive, default=300, metavar="S", help="the time limit of each (300)")
    return parser
