"""The command ``shardproof merge``: joins run files into one."""

import argparse
import contextlib
import gzip
import json
import os
import tempfile
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
        made = _write(out, merged.data)
    except BadFile as error:
        return commands.refuse(error)
    except OSError as error:
        return commands.refuse(f"{out}: {error.strerror or error}")
    for label, (count, started) in merged.repeated.items():
        cases = "1 case is" if count == 1 else f"{count} cases are"
        runs = f"runs started {' and '.join(started)}"
        print(printable(f"{label}: {cases} in more than one file, of {runs}; the worst verdict of each is kept"))
    columns = len(merged.data["environment"]["implementations"])
    records = counted(len(merged.data["cases"]), "record")
    print(printable(f"{out}: {counted(columns, 'implementation')}, {records}{made}"))
    return 0


def _write(path: Path, data: Mapping[str, Any]) -> str:
    """Write a run file at once, or raise an OSError: until all is written, a file of the name stays as it was.

    Returns whether its folder was made, in words.
    """
    if path.exists() and not path.is_file():
        raise OSError("not a regular file; a run file must be one")
    lines = [f"{json.dumps(name)}: {_value(name, value)}\n" for name, value in data.items()]
    content = ("{" + ",".join(lines) + "}\n").encode()
    path = path.resolve()
    made = folders.make(path.parent)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            # The time in the header would make two equal files differ.
            file.write(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return made


def _value(name: str, value: Any) -> str:
    """Return a field as JSON in ASCII, with one line for each record."""
    if name != "cases":
        return json.dumps(value, allow_nan=False)
    return "[\n" + "\n,".join(json.dumps(record, allow_nan=False) for record in value) + "\n]"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
