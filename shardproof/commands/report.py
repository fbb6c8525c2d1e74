"""The command ``shardproof report``: prints a run file, or what changed between runs of one commit."""

import argparse
import sys
from collections.abc import Sequence

from shardproof import commands
from shardproof.commands.judgement import write_json
from shardproof.reports.dashboard import dashboard, lines
from shardproof.reports.flakes import render_flakes
from shardproof.reports.matrix import render_summary
from shardproof.reports.profiles import render_profiles
from shardproof.reports.texts import coloured
from shardproof.runfile import load_run

_EPILOG = """\
examples:
  shardproof report run.json            a row for each requirement
  shardproof report run.json --cases    a row for each case
  shardproof report run.json.partial    what a run that ended early has done
  shardproof report out/*.json          cases that do not always end alike, in runs of one commit
  shardproof report --profiles *.json   which profiles each implementation reaches, of those that ran
  shardproof report --profiles run.json --json dashboard.json
                                        the same, and counts and failed requirements as JSON for a dashboard

exit codes: 0 printed, whatever failed; 1 an incomplete run was printed; 2 a file cannot be read, or several are not
of one commit, torch and device"""

INCOMPLETE = 1


@commands.reader
def report(arguments: Sequence[str]) -> int:
    """Print the matrix, failures and skips of a run file; of several, the cases whose verdict changed.

    Failing cases do not change the exit code: the run has already judged them. It is 0; 1 for the journal of an
    incomplete run; or 2 if a file cannot be read or the runs cannot be compared, with one line on stderr.
    """
    options = _parser().parse_args(arguments)
    runs = {file: load_run(file) for file in options.files}
    [run, *others] = runs.values()
    if options.json and (others or not options.profiles):
        return commands.refuse("report: --json is of one run, with --profiles")
    if options.profiles:
        text = render_profiles(runs.values())
        if options.json:
            found = dashboard(run)
            text += lines(found)
            if code := write_json("report", options.json, found):
                return code
    else:
        text = render_flakes(runs) if others else render_summary(run, by_case=options.cases, full=options.full)
    print(coloured(text, sys.stdout), end="")
    return INCOMPLETE if any(run.incomplete for run in runs.values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser(
        "shardproof report",
        description="Print a run file: failures with the commands that repeat them, what was skipped and why, and a "
        "matrix with a row for each requirement of the contract and a column for each implementation. For several "
        "runs of one commit, print the cases whose verdicts differ, with seeds, place and host of each attempt.",
        epilog=_EPILOG,
    )
    parser.add_argument("files", nargs="+", metavar="file", help="a run file, or the FILE.partial of an incomplete run")
    parser.add_argument("--cases", action="store_true", help="print one row for each case instead of each requirement")
    parser.add_argument("--profiles", action="store_true", help="print how far each is from the contract's profiles")
    parser.add_argument("--json", metavar="FILE", help="with --profiles, write one run as JSON for a dashboard")
    parser.add_argument("--full", action="store_true", help="print each failure, and long texts in full")
    return parser
