"""Writes docs/findings.md, the index of the findings, from the headers of findings/*.py.

``--check`` compares instead of writing. Run as ``python docs/make_findings.py`` in the repository's root.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from generating import ROOT, write

sys.path.insert(0, str(ROOT))  # a clone need not be installed

from shardproof.findings import Finding, FindingError, load

PAGE = ROOT / "docs/findings.md"

_HEAD = """\
# Findings

What the suites found in other implementations: one file each in [findings/](../findings), which describes the error and
shows it by a program that needs nothing of shardproof. A case that meets a finding is expected to fail by an entry in
`suites/expectations/<implementation>.toml`, which links to its file ([cases.md](cases.md#known-failures)). Where a
whole feature is wrong its capability is not declared instead, as in F-4.

`OMP_NUM_THREADS=1 python findings/F002.py` runs one program. `shardproof findings --run` runs all those for which the
host has what they need, and says of each whether the error is there, by the headers that
[shardproof/findings.py](../shardproof/findings.py) describes. *State* is what the newest version of torch showed with
which it was run.

Threads that a header lists as `upstream` are about exactly that error, in the tracker of the implementation, with their
state when they were looked up (pull requests of pytorch/pytorch are closed when they land); `related` are others that
help a reader. Of a finding without `upstream` we know no such thread.

Written by `python docs/make_findings.py`; `tests/test_findings.py` compares.

| finding | title | implementation | state |
|---|---|---|---|"""


def page(findings: Sequence[Finding]) -> str:
    """Write docs/findings.md."""
    rows = []
    for one in findings:
        link, title = f"[{one.id}](../findings/{one.path.name})", one.title.replace("|", "\\|")
        names = ", ".join(f"`{name}`" for name in one.implementations)
        rows.append(f"| {link} | {title} | {names} | {one.state} |")
    return "\n".join([_HEAD, *rows]) + "\n"


def main(arguments: Iterable[str] | None = None) -> int:
    """Write the page, or compare it.

    Args:
        arguments: of the command line; those of the process unless given.

    Returns:
        The exit code: 0, or 1 if a finding cannot be read or the page is out of date.
    """
    parser = argparse.ArgumentParser(description="docs/findings.md, from the headers of findings/*.py")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of date")
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        written = {PAGE: page(load())}
    except FindingError as error:
        print(error, file=sys.stderr)
        return 1
    return write(written, compares=options.check, script="docs/make_findings.py")


if __name__ == "__main__":
    raise SystemExit(main())
