"""The command ``shardproof compare``: says where two recordings of a training first diverge."""

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardproof import commands, folders
from shardproof.commands import judgement
from shardproof.door import BadFile

if TYPE_CHECKING:
    from shardproof.harness.training.comparing import Comparison

DIVERGES = 1

_EPILOG = """\
examples:
  shardproof compare ref run
  shardproof compare ref run --noise ref2 --report run.json
  shardproof compare before after --align data

The recordings may be of other numbers of ranks, other meshes and another accumulation, but must have read the same
data. A training that was resumed is aligned with the one before: --align data, or --align 4 where step 0 of RUN is
step 4 of REF. docs/record.md describes what is compared, and how.

exit codes: 0 they agree; 1 they diverge; 2 a recording cannot be read, or the runs read different data"""


@commands.reader
def compare(arguments: Sequence[str]) -> int:
    """Compare two recordings; the exit code is 0 if they agree, 1 if they diverge, 2 for bad input."""
    options = _parser().parse_args(arguments)
    from shardproof.harness.training import comparing, recording, report

    ref, run = recording.read(options.ref), recording.read(options.run)
    noise = recording.read(options.noise) if options.noise else None
    found = comparing.compare(ref, run, noise=noise, align=_offset(options.align))
    if options.report:
        try:
            report.write_comparison(options.report, found)
        except folders.NotWritten as error:
            return commands.refuse(f"compare: {error}")
    text = comparing.render(found)
    print(text)
    refused = judgement.write(options.json, judgement.of("compare", [*_items(found)], text))
    return refused or (0 if found.agrees else DIVERGES)


def _items(found: "Comparison") -> Iterator[judgement.Item]:
    for line in found.resumption.lines if found.resumption is not None else ():
        yield judgement.Item(kind="divergence", title=line)
    for one in found.divergent:
        yield judgement.Item(
            kind="divergence",
            title=one.what,
            codes=judgement.codes_in(one.lines),
            lines=one.lines,
            where={"rank": one.rank, "step": one.step, "stage": one.stage, "name": one.name,
                   "distance": one.distance, "allowed": one.allowed},
        )  # fmt: skip


def _offset(text: str | None) -> int | str | None:
    """Read the argument of ``--align``.

    Raises:
        BadFile: it is neither; in one line.
    """
    if text is None or text == "data":
        return text
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise BadFile(f"--align {text}: expected data, or the step of REF that is step 0 of RUN, such as 4")
    return int(text)


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
    parser.add_argument("--align", metavar="data|N", help="the step of REF that is step 0 of RUN, a training that was "
                        "resumed; data finds it by the data that both have read")  # fmt: skip
    parser.add_argument("--report", metavar="FILE", help="write a run file for the page and the gate")
    judgement.add_option(parser)
    return parser
