"""The command ``shardproof reproduce``: a program of plain torch that fails as a case does."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from shardproof import commands, folders
from shardproof.door import BadFile, printable
from shardproof.runfile import load_run

_EPILOG = """\
example:
  shardproof reproduce "suites/test_clipping.py::test_empty_shards[torch.fully_shard-w4-inf]" -o repro.py

exit codes: 0 the program is written and fails as the case does; 1 the case passes, or there is no such program, for the
reason on stderr; 2 the implementation is not torch's own, or the case does not run"""

_OF_TORCH = ("torch.fully_shard", "torch.fsdp")


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
    options = parser.parse_args(arguments)
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
    from shardproof import reproducers
    from shardproof.harness.worlds import instruments

    with tempfile.TemporaryDirectory(prefix="shardproof-reproduce-") as folder:
        words = ["shardproof", "run"] if options.nodeid.startswith("suites/") else ["pytest"]
        words += [options.nodeid, "--impl", found[1], "--device", "cpu", "--runxfail", "-q", "-p", "no:cacheprovider"]
        words += ["-m", "nightly or not nightly", "--report", f"{folder}/run.json"]
        environment = os.environ | instruments.environment(folder, "shardproof.harness.watching.tape:recorded")
        done = subprocess.run([sys.executable, "-m", *words], env=environment, capture_output=True, text=True)
        try:
            (record,) = load_run(f"{folder}/run.json").cases
        except (BadFile, ValueError):
            said = ["", *(done.stdout + done.stderr).strip().splitlines()]
            return commands.refuse(f"reproduce: {options.nodeid} did not run: {said[-1]}")
        tapes = [json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("rank*.json"))]
    failure = record.failure.text.strip() if record.failure is not None else ", ".join(record.missing)
    print(printable(f"the case: {record.verdict}  {failure.partition(chr(10))[0]}"))
    try:
        if record.verdict not in ("fail", "crash"):
            raise reproducers.NotReproducible(f"the verdict is {record.verdict}")
        program = reproducers.Program(tapes, record.id, record.world)
        shrinking = reproducers.Shrinking(program)
        if not shrinking.holds:
            raise reproducers.NotReproducible(f"with torch alone: {_last(shrinking.said)}, not {program.label}")
        text = shrinking.run()
    except reproducers.NotReproducible as error:
        print(printable(f"shardproof: not reproduced: {' '.join(str(error).split())[:500]}"), file=sys.stderr)
        return 1
    try:
        folders.write_file(pathlib.Path(options.output), text)
    except folders.NotWritten as error:
        return commands.refuse(printable(f"reproduce: {error}"))
    does = "passes" if shrinking.has_control else "does not run"
    print(f"tried {shrinking.trials} smaller programs; with the reference implementation it {does}")
    done = subprocess.run([sys.executable, options.output], capture_output=True, text=True)
    print(f"{options.output}: {len(text.splitlines())} lines, exit code {done.returncode}: {_last(done.stderr)}")
    return 0 if done.returncode and program.fails_alike(done.stderr) else 1


def _last(text: str) -> str:
    found = [line.strip() for line in text.splitlines() if re.match(r"\w*(Error|Exception|Warning)\b", line)]
    return found[-1][:300] if found else "no error"
