"""The command ``shardproof explain``: prints the documentation of a code, a finding, a requirement or an exit code."""

import argparse
import textwrap
from collections.abc import Iterator, Sequence

from shardproof import commands, pages
from shardproof.door import printable
from shardproof.findings import FOLDER, FindingError, read
from shardproof.harness.judging import codes

_EPILOG = """\
examples:
  shardproof explain {check} {signature}
  shardproof explain F-17
  shardproof explain ACCUMULATION-3
  shardproof explain 2

exit codes: 0; 2 there is nothing of that name"""
_EXAMPLES = {"check": codes.REDUCED_ONCE, "signature": codes.SOME_MICROBATCHES}

_WIDTH = 100
_KINDS = (
    "a code of the doctor, as at the ends of its lines, a finding such as F-17, a requirement such as ACCUMULATION-3, "
    "or an exit code"
)


def explain(arguments: Sequence[str]) -> int:
    """Print what the documentation says of each name; the exit code is 0, or 2 if it has one of them nowhere."""
    options = _parser().parse_args(arguments)
    texts = {name: "\n".join(_lines(name.upper())) for name in options.names}
    if unknown := [name for name, text in texts.items() if not text]:
        return commands.refuse(f"explain: {unknown[0]!r} is in no table of the documentation; expected {_KINDS}")
    print("\n\n".join(texts.values()))
    return 0


def _lines(name: str) -> Iterator[str]:
    for number, row in enumerate(pages.rows(name)):
        if number:
            yield ""
        of = f": {row.before.rstrip(':')}" if row.before else ""
        yield f"{name}  docs/{row.page}, {row.heading}{of}"
        for column, cell in row.cells:
            if cell:
                yield from _filled(f"{column}: {cell}" if column else cell)
    for page, heading, text in pages.sections(name):
        yield f"\n{name}  docs/{page}, {heading}\n"
        yield from (f"  {line}".rstrip() for line in pages.plain(text).splitlines())
    yield from _of_finding(name)


def _filled(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _of_finding(name: str) -> Iterator[str]:
    """What the file of a finding says, which a clone alone has."""
    file = FOLDER / f"F{name[2:].zfill(3)}.py"
    if not (name.startswith("F-") and name[2:].isdecimal() and file.exists()):
        return
    try:
        finding = read(file)
    except FindingError as error:
        yield f"\n  {printable(str(error))}"
        return
    yield f"\n{name}  findings/{file.name}\n"
    yield from (f"  {line}".rstrip() for line in finding.text.splitlines())
    if finding.right:
        yield from ("", *_filled(f"right: {finding.right}"))
    if finding.has_code:
        yield from ("", f"  the program: python findings/{' '.join([file.name, *finding.arguments])}")


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser(
        "shardproof explain",
        description="Print what the documentation says of a check or a signature of the doctor, of a finding, of a "
        "requirement of the contract, or of an exit code. Needs neither torch nor a clone, except for the program of a "
        "finding.",
        epilog=_EPILOG.format(**_EXAMPLES),
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help=_KINDS)
    return parser
