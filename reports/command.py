"""The command `shardproof report`: prints what a run file says."""

import argparse
import sys
from collections.abc import Sequence

from shardproof.reports.matrix import render_summary
from shardproof.reports.run import RunFileError, load_run

BAD_INPUT = 2


def report(arguments: Sequence[str]) -> int:
    """Print a run file's matrix, failures and skips.

    Failing cases do not change the exit code: a report reads, it does not judge.

    Args:
        arguments: of the command, without its name.

    Returns:
        0, or 2 with one line on stderr for a file that cannot be read.

    Raises:
        SystemExit: with code 2 for unknown arguments and 0 for ``--help``, as argparse does.
    """
    options = _parser().parse_args(arguments)
    try:
        run = load_run(options.file)
    except RunFileError as error:
        print(f"shardproof: {error}", file=sys.stderr)
        return BAD_INPUT
    print(render_summary(run, by_case=options.cases, full=options.full), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shardproof report", description="Print what a run file of shardproof says.")
    parser.add_argument("file", help="a run file, as --report wrote it")
    parser.add_argument("--cases", action="store_true", help="one row for each case, not for each requirement")
    parser.add_argument("--full", action="store_true", help="print the failures' texts whole, however long")
    return parser
