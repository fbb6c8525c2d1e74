"""The command ``shardproof expectations``: drafts known failures from a run file, or checks those of several."""

import argparse
from collections.abc import Mapping, Sequence

from shardproof import commands
from shardproof.door import BadFile
from shardproof.reports.draft import draft
from shardproof.reports.mended import check
from shardproof.runfile import Run, load_run

TO_DO = 1

_EPILOG = """\
examples:
  shardproof run --impl my_adapters:MyAdapter --explain --report run.json
  shardproof expectations run.json > my_adapters.toml
  shardproof run --impl my_adapters:MyAdapter --expectations my_adapters.toml
  shardproof expectations --check torch-2.14.json torch-2.15.json

exit codes: 0; 1 with --check, something is to be done; 2 a file cannot be read or is incomplete, or has several
implementations and none is named"""


@commands.reader
def expectations(arguments: Sequence[str]) -> int:
    """Print a file of known failures or, with ``--check``, the entries that are to be changed.

    The exit code is 0; 1 if entries are to be changed; 2 if a file cannot be read or is of several implementations,
    with one line on stderr.
    """
    options = _parser().parse_args(arguments)
    runs = {path: load_run(path) for path in options.run}
    if options.check:
        found = check(runs)
        print("\n".join(found) or "every known failure that ran still fails")
        return TO_DO if found else 0
    print(_drafted(runs, options.impl), end="")
    return 0


def _drafted(runs: Mapping[str, Run], implementation: str | None) -> str:
    if len(runs) != 1:
        raise BadFile("a draft is made from one run file; --check takes several")
    [(path, run)] = runs.items()
    if run.incomplete:
        raise BadFile(f"{path} is incomplete ({run.incomplete}): more cases may fail than it has")
    names = run.implementations
    if implementation is None and len(names) != 1:
        raise BadFile(f"{path} has {', '.join(names) or 'no implementation'}: name one with --impl")
    return draft(run, implementation or names[0])


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser(
        "shardproof expectations",
        description="Draft the known failures of an implementation from a run file, to be edited: each failed case "
        "with the place where it first diverges, or its error, as the reason. The place is the more exact one that the "
        "run found if it had --explain. With --check, list the known failures of the runs that pass now, with the "
        "version of torch that should bound each, and those that match no case.",
        epilog=_EPILOG,
    )
    parser.add_argument("run", metavar="RUN", nargs="+", help="a complete run file; with --check, one or several")
    parser.add_argument("--check", action="store_true", help="list the entries that should change")
    parser.add_argument("--impl", metavar="NAME", help="for a draft: the implementation, if the run has several")
    return parser
