"""The command ``shardproof gate``: says whether a run is worse than an earlier one."""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from shardproof import commands
from shardproof.commands import judgement
from shardproof.reports.accepted import accept, load
from shardproof.reports.regressions import ALLOWED, check_comparable, compare
from shardproof.reports.regressions_text import FORMATS, as_text, described
from shardproof.reports.texts import coloured
from shardproof.runfile import Run, load_run

WORSE = 1

_EPILOG = """\
examples:
  shardproof gate base.json head.json
  shardproof gate base.json head.json --format markdown >> "$GITHUB_STEP_SUMMARY"
  shardproof gate base.json head.json --accept accepted.toml --more-skips 2

docs/gate.md says what counts as worse, and has a workflow to copy."""


@commands.reader
def gate(arguments: Sequence[str]) -> int:
    """Compare two run files and print what got worse.

    The exit code is 0 if nothing got worse but what is accepted, 1 if something did, or 2 if a file cannot be read, the
    two cannot be compared, or what is accepted did not happen, with one line on stderr.
    """
    options = _parser().parse_args(arguments)
    base, head = load_run(options.base), load_run(options.head)
    check_comparable(base, head, allowed=options.allow)
    outcome = compare(base, head, more_skips=options.more_skips, time_ratio=options.time_ratio)
    if options.accept is not None:
        outcome = accept(outcome, load(options.accept))
    outcome = replace(outcome, runs=_described(options, base, head), verbose=options.verbose)
    text = FORMATS[options.format](outcome)
    print(coloured(text, sys.stdout) if options.format == "text" else text, end="")
    items = [
        judgement.Item(
            kind=one.kind,
            title=one.text,
            where={"implementation": one.implementation, "case": one.case, "reproduce": one.reproduce},
        )
        for one in outcome.worse
    ]
    refused = judgement.write(options.json, judgement.of("gate", items, as_text(outcome)))
    return refused or (WORSE if outcome.worse else 0)


def _described(options: argparse.Namespace, base: Run, head: Run) -> tuple[str, ...]:
    lines = [described(base, "BASE", options.base), described(head, "HEAD", options.head)]
    if base.suites and head.suites and base.suites != head.suites:
        lines.append("the suites differ: cases may have changed")
    if base.environment.started > head.environment.started:
        lines.append("BASE started after HEAD: are the two files swapped?")
    return tuple(lines)


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser(
        "shardproof gate",
        description="Compare the run file of a change with that of the commit before it; give both runs the same "
        "chapters, --world and -k. The exit code is 0 if nothing "
        "got worse, 1 if something did, and 2 if the files cannot be compared.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("base", metavar="BASE", help="the run file from before the change")
    add("head", metavar="HEAD", help="the run file from after it")
    add("--format", choices=FORMATS, default="text", help="text, Markdown or GitHub annotations")
    add("--allow", action="append", choices=ALLOWED, default=[], help="compare even if this differs; may be repeated")
    add(
        "--more-skips",
        type=_count,
        default=0,
        metavar="N",
        help="allow up to N more skipped cases of an implementation",
    )
    add(
        "--time-ratio",
        type=_ratio,
        metavar="R",
        help="allowed slowdown, such as 1.2; without it, times are not compared",
    )
    add("-v", "--verbose", action="store_true", help="show each regression, not one of those that are alike")
    add("--accept", metavar="FILE", help="a TOML file of what may get worse, with reasons; docs/gate.md describes it")
    judgement.add_option(parser)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of cases")
    return int(text)


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
