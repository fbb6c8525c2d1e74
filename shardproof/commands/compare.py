"""The command ``shardproof compare``: says where two recordings of a training first diverge."""

import argparse
from collections.abc import Sequence

from shardproof import commands, folders

DIVERGES = 1

_EPILOG = """\
examples:
  shardproof compare ref run
  shardproof compare ref run --noise ref2 --report run.json

The recordings may be of other numbers of ranks, other meshes and another accumulation, but must have read the same
data. docs/record.md describes what is compared, and how.

exit codes: 0 they agree; 1 they diverge; 2 a recording cannot be read, or the runs read different data"""


@commands.reader
def compare(arguments: Sequence[str]) -> int:
    """Compare two recordings; the exit code is 0 if they agree, 1 if they diverge, 2 for bad input."""
    options = _parser().parse_args(arguments)
    from shardproof.harness.training import comparing, recording, report

    ref, run = recording.read(options.ref), recording.read(options.run)
    noise = recording.read(options.noise) if options.noise else None
    found = comparing.compare(ref, run, noise=noise)
    if options.report:
        try:
            report.write_comparison(options.report, found)
        except folders.NotWritten as error:
            return commands.refuse(f"compare: {error}")
    print(comparing.render(found))
    return DIVERGES if found.divergent else 0


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser(
        "shardproof compare",
        description="Say for each rank of a recording where it first diverges from a reference, in the order of "
        "execution, with the mistake that it looks like. Needs no process group and no GPU.",
        epilog=_EPILOG,
    )
    parser.add_argument("ref", metavar="REF", help="the folder of the reference's recording")
    parser.add_argument("run", metavar="RUN", help="the folder of the recording to judge")
    parser.add_argument("--noise", metavar="REF2", help="a second recording of the reference, to take tolerances from")
    parser.add_argument("--report", metavar="FILE", help="write a run file for the page and the gate")
    return parser
