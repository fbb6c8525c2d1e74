"""The command ``shardproof merge``: joins run files into one."""

import argparse
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof import commands, folders
from shardproof.door import BadFile, printable
from shardproof.reports.merge import merge as joined
from shardproof.reports.texts import counted

_EPILOG = """\
examples:
  shardproof merge out/run.json out/deepspeed.json --output out/all.json
  shardproof report out/all.json

exit codes: 0; 2 a file cannot be read, joined or written"""


@commands.reader
def merge(arguments: Sequence[str]) -> int:
    """Join run files and write the result.

    The exit code is 0, or 2 if a file cannot be read, joined or written, with one line on stderr.
    """
    options = _parser().parse_args(arguments)
    out = Path(options.output)
    try:
        merged = joined([Path(name) for name in options.files], command=["shardproof", "merge", *arguments])
        made = folders.write_file(out, _content(merged.data, compresses=out.resolve().suffix == ".gz"))
    except (BadFile, folders.NotWritten) as error:
        return commands.refuse(error)
    for label, (count, started) in merged.repeated.items():
        cases = "1 case is" if count == 1 else f"{count} cases are"
        runs = f"runs started {' and '.join(started)}"
        print(printable(f"{label}: {cases} in more than one file, of {runs}; the worst verdict of each is kept"))
    columns = len(merged.data["environment"]["implementations"])
    records = counted(len(merged.data["cases"]), "record")
    print(printable(f"{out}: {counted(columns, 'implementation')}, {records}{made}"))
    return 0


def _content(data: Mapping[str, Any], *, compresses: bool) -> bytes:
    """Return the content of a run file."""
    lines = [f"{json.dumps(name)}: {_value(name, value)}\n" for name, value in data.items()]
    content = ("{" + ",".join(lines) + "}\n").encode()
    # The time in the header would make two equal files differ.
    return gzip.compress(content, mtime=0) if compresses else content


def _value(name: str, value: Any) -> str:
    """Return a field as JSON in ASCII, with one line for each record."""
    if name != "cases":
        return json.dumps(value, allow_nan=False)
    return "[\n" + "\n,".join(json.dumps(record, allow_nan=False) for record in value) + "\n]"


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser(
        "shardproof merge",
        description="Join the run files of several environments into one, whose report is one matrix. A column is an "
        "implementation with its version, the version of torch and the device type.",
        epilog=_EPILOG,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="complete run files; merged ones too")
    parser.add_argument("--output", "-o", required=True, metavar="FILE", help="the file to write; .gz compresses it")
    return parser
