"""Writes docs/findings.md, the index of the findings, from the headers of findings/*.py.

``--check`` compares instead of writing. Run as ``python docs/make_findings.py`` in the repository's root.
"""

import pathlib
from collections.abc import Sequence

from generating import ROOT, write_or_compare

from shardproof.findings import Finding, load

PAGE = ROOT / "docs/findings.md"

_HEAD = """\
# Findings

What the suites found in other implementations: one file each in [findings/](../findings), which describes the error and
shows it by a program that needs nothing of shardproof. A case that meets a finding is expected to fail by an entry in
`suites/expectations/<implementation>.toml`, which links to its file ([options.md](options.md#known-failures)). Where a
whole feature is wrong its capability is not declared instead, as in F-4.

`OMP_NUM_THREADS=1 python findings/F002.py` runs one program. `shardproof findings --run` runs all those for which the
host has what they need, and says of each whether the error is there, by the headers that
[shardproof/findings.py](../shardproof/findings.py) describes. *State* is `mended in torch X` where
the header has `fixed_in`; otherwise what the newest version of torch showed with which the program was run.

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


def made() -> dict[pathlib.Path, str]:
    """The contents of the page; ValueError if a finding cannot be read."""
    return {PAGE: page(load())}


if __name__ == "__main__":
    raise SystemExit(write_or_compare(made, __doc__))
