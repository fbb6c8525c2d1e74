"""The command ``shardproof reproduce``: a program of plain torch that fails as a case does."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardproof import commands, folders
from shardproof.door import BadFile, printable
from shardproof.runfile import CaseRecord, load_run

_EPILOG = """\
example:
  shardproof reproduce "suites/test_clipping.py::test_empty_shards[torch.fully_shard-w4-inf]" -o repro.py

exit codes: 0 the program is written and fails as the case does; 1 the case passes, or there is no such program, for the
reason on stderr; 2 the implementation is not torch's own, or the case does not run, or not to its end in time"""

_OF_TORCH = ("torch.fully_shard", "torch.fsdp")
#: Seconds from the beginning to the end.
SECONDS = 120
#: Which part of them is kept for the program that is written, which runs once more.
_LAST = 1 / 6
#: The seconds in which a run that is ended early removes what it has made.
_TIDY = 5


class _NotRun(Exception):
    """Why the case was not recorded, in one line."""


def reproduce(arguments: Sequence[str]) -> int:
    """Write the program, and return the exit code."""
    parser = commands.parser(
        "shardproof reproduce",
        description="Run a failing case of torch.fully_shard or torch.fsdp on the CPU, and write what it makes torch "
        "do, without shardproof, as a program that is shrunk for as long as it fails alike: docs/reproduce.md.",
        epilog=_EPILOG,
    )
    parser.add_argument("nodeid", metavar="NODEID", help="the pytest item, as a failure names it")
    parser.add_argument("-o", "--output", default="repro.py", metavar="FILE", help="the program (default: repro.py)")
    limit = f"the time limit of all of it, after which the smallest program so far is written ({SECONDS})"
    parser.add_argument("--seconds", type=commands.positive, default=SECONDS, metavar="S", help=limit)
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.seconds
    found = re.search(r"::\w+\[([\w.:]+)", options.nodeid)
    if found is None:
        brackets = "its brackets have the implementation and the parameters"
        item = f"suites/test_clipping.py::test_empty_shards[{_OF_TORCH[0]}-w4-inf]"
        given = f"reproduce: {options.nodeid!r} is no item"
        return commands.refuse(printable(f"{given}: {brackets}, as in {item!r}; a failure prints it"))
    if found[1] not in _OF_TORCH:
        return commands.refuse(
            f"reproduce: {found[1]} is not torch alone; it writes programs of {' and '.join(_OF_TORCH)}"
        )
    try:
        record, tapes = _recorded(options.nodeid, found[1], until)
    except _NotRun as error:
        return commands.refuse(f"reproduce: {options.nodeid} did not {error}")
    failure = record.failure.text.strip() if record.failure is not None else ", ".join(record.missing)
    print(printable(f"the case: {record.verdict}  {failure.partition(chr(10))[0]}"))
    from shardproof.harness.reproducing.program import NotReproducible, Program
    from shardproof.harness.reproducing.shrinking import Shrinking

    try:
        if record.verdict not in ("fail", "crash"):
            raise NotReproducible(f"the verdict is {record.verdict}")
        program = Program(tapes, record.id, record.world)
        shrinking = Shrinking(program, until - options.seconds * _LAST)
        if not shrinking.holds:
            raise NotReproducible(f"with torch alone: {_last(shrinking.said)}, not {program.label}")
        text = shrinking.run()
    except NotReproducible as error:
        print(printable(f"shardproof: not reproduced: {' '.join(str(error).split())[:500]}"), file=sys.stderr)
        return 1
    try:
        folders.write_file(pathlib.Path(options.output), text)
    except folders.NotWritten as error:
        return commands.refuse(printable(f"reproduce: {error}"))
    does = "passes" if shrinking.has_control else "does not run"
    print(f"tried {shrinking.trials} smaller programs; with the reference implementation it {does}")
    if shrinking.left_out:
        print(f"the time of {options.seconds} seconds was over: {shrinking.left_out} smaller programs were not tried")
    code, said = _run([sys.executable, options.output], until)
    written = f"{options.output}: {len(text.splitlines())} lines"
    if code is None:
        print(f"{written}, not run once more to its end: the time was over")
        return 0
    print(f"{written}, exit code {code}: {_last(said)}")
    return 0 if code and program.fails_alike(said) else 1


def _recorded(nodeid: str, implementation: str, until: float) -> tuple[CaseRecord, list[Any]]:
    """Run the case once, and return its record and the tapes of its ranks; _NotRun says what it did not do."""
    from shardproof.harness.worlds import instruments

    with tempfile.TemporaryDirectory(prefix="shardproof-reproduce-") as folder:
        words = ["shardproof", "run"] if nodeid.startswith("suites/") else ["pytest"]
        words += [nodeid, "--impl", implementation, "--device", "cpu", "--runxfail", "-q", "-p", "no:cacheprovider"]
        words += ["-m", "nightly or not nightly", "--report", f"{folder}/run.json"]
        instrument = "shardproof.harness.reproducing.tape:recorded"
        environment = os.environ | instruments.environment(folder, instrument)
        code, said = _run([sys.executable, "-m", *words], until, environment, meanwhile=_prepare)
        if code is None:
            raise _NotRun("end in time: give it more by --seconds")
        try:
            (record,) = load_run(f"{folder}/run.json").cases
        except (BadFile, ValueError):
            raise _NotRun(f"run: {['', *said.strip().splitlines()][-1]}") from None
        return record, [json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("rank*.json"))]


def _prepare() -> None:
    from shardproof.harness.reproducing import shrinking

    shrinking.prepare()


def _run(
    words: list[str],
    until: float,
    environment: Mapping[str, str] | None = None,
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[int | None, str]:
    """Run a command until it ends or the time is over; return its exit code, None if it has not ended, and its output.

    None of its processes is left, also if this one is interrupted.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, start_new_session=True
        )
        code = None
        try:
            meanwhile()
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(max(0.0, until - time.monotonic()))
        finally:
            _end(process)
        printed.seek(0)
        return code, printed.read()


def _end(process: subprocess.Popen[Any]) -> None:
    """End a command and its processes; ranks, which lead sessions of their own, end with the process they come from."""
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TIDY)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last(text: str) -> str:
    found = [line.strip() for line in text.splitlines() if re.match(r"\w*(Error|Exception|Warning)\b", line)]
    return found[-1][:300] if found else "no error"
