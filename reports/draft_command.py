"""The command ``shardproof expectations``: drafts the known failures of an implementation from a run file."""

import argparse
import sys
from collections.abc import Sequence

from shardproof.reports import helptext
from shardproof.reports.command import BAD_INPUT
from shardproof.reports.draft import draft
from shardproof.reports.run import RunFileError, load_run

_EPILOG = """\
examples:
  shardproof run --impl my_adapters:MyAdapter --explain --report run.json
  shardproof expectations run.json > my_adapters.toml
  shardproof run --impl my_adapters:MyAdapter --expectations my_adapters.toml

exit codes: 0; 2 the file cannot be read, is incomplete, or has several implementations and none is named"""


def expectations(arguments: Sequence[str]) -> int:
    """Print a file of known failures.

    Args:
        arguments: the arguments after the name of the command.

    Returns:
        The exit code: 0, or 2 if the file cannot be read or is of several implementations, with one line on stderr.

    Raises:
        SystemExit: from argparse, with code 2 for unknown arguments and 0 for ``--help``.
    """
    options = _parser().parse_args(arguments)
    try:
        run = load_run(options.run)
        if run.incomplete:
            raise ValueError(f"{options.run} is incomplete ({run.incomplete}): what fails in it is not all that fails")
        names = run.implementations
        if options.impl is None and len(names) != 1:
            raise ValueError(f"{options.run} has {', '.join(names) or 'no implementation'}: name one with --impl")
        print(draft(run, options.impl or names[0]), end="")
    except (RunFileError, ValueError) as error:
        print(f"shardproof: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = helptext.parser(
        "shardproof expectations",
        description="Draft the known failures of an implementation from a run file, to be edited: each failed case "
        "with the place where it first diverges, or its error, as the reason. The place is the more exact one that the "
        "run found if it had --explain.",
        epilog=_EPILOG,
    )
    parser.add_argument("run", metavar="RUN", help="a complete run file")
    parser.add_argument("--impl", metavar="NAME", help="the implementation, if the run has several")
    return parser
