"""The command line: `python -m reports summary out/run.json`."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from reports.matrix import render_summary
from reports.run import RunFileError, load_run

BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 with one line on stderr for a file that cannot be read.

    Failing cases do not change the exit code: a summary reads, it does not judge. Raises SystemExit(2) for arguments
    that it does not know, as argparse does.
    """
    options = _parser().parse_args(arguments)
    try:
        run = load_run(options.file)
    except RunFileError as error:
        print(f"reports: {error}", file=sys.stderr)
        return BAD_INPUT
    print(render_summary(run, by_case=options.cases, full=options.full), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reports", description="Reads run files of shardproof.")
    commands = parser.add_subparsers(dest="command", required=True)
    summary = commands.add_parser("summary", help="print a run file's matrix, failures and skips")
    summary.add_argument("file", help="a run file, as pytest's --report wrote it")
    summary.add_argument("--cases", action="store_true", help="one row for each case, not for each requirement")
    summary.add_argument("--full", action="store_true", help="print the failures' texts whole, however long")
    return parser


def _print_anything() -> None:
    """A terminal without Unicode shows what it cannot print as escapes, where Python would raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run_as_command() -> int:
    _print_anything()
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough; the flush at exit must not complain either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(_run_as_command())
