"""Draws suites/crossed.toml, the trainings that cross features, and writes docs/crossed.md about what they cover.

``--check`` compares instead of writing. Rows are drawn for the triples of torch.fsdp and of torch.fully_shard, then for
the pairs of every other implementation. To draw anew changes items: published runs keep the ids that they had.

Run as ``python docs/make_crossed.py`` in the repository's root.
"""

import pathlib
from collections.abc import Mapping

from generating import ROOT, write_or_compare

from shardproof.harness.adapters import registry
from shardproof.suites import crossed

TABLE, PAGE = ROOT / "suites/crossed.toml", ROOT / "docs/crossed.md"
TRIPLES = ("torch.fsdp", "torch.fully_shard")
#: What takes long is not combined with more than is asked.
SELDOM = ("compiled",)

_HEAD = """\
# Features crossed

Most bugs that were missed needed three features at once. Each row of
[`suites/crossed.toml`](../suites/crossed.toml) is a training with one value of each axis, an ordinary item of
`suites/test_drawn_crossed.py`; it is compared, bit for bit, with full copies that make the same casts. An
implementation is asked the rows whose values it claims.

Written by `python docs/make_crossed.py`; `tests/test_features.py` compares."""


def made() -> Mapping[pathlib.Path, str]:
    """Return the texts of both files by their paths."""
    claims = {name: registry.load(name).capabilities() for name in sorted(registry.BUILT_IN)}
    rows: list[crossed.Row] = []
    for name in sorted(claims, key=lambda one: one not in TRIPLES):
        rows += crossed.draw(claims[name], 3 if name in TRIPLES else 2, known=rows, seldom=SELDOM)
    head = f"# Written by docs/make_crossed.py: in each row the values of\n# {', '.join(crossed.AXES)}.\nrows = ["
    table = "\n".join([head, *(f'    "{" ".join(row.values())}",' for row in rows), "]", ""])
    page = [_HEAD, "", "| axis | values |", "|---|---|"]
    page += [f"| {axis} | {', '.join(values)} |" for axis, values in crossed.AXES.items()]
    page += ["", "| implementation | rows | pairs | triples |", "|---|---|---|---|"]
    for name, capabilities in claims.items():
        counts = []
        for size in (2, 3):
            asked = set(crossed.possible(capabilities, size))
            counts.append(f"{len(asked & crossed.covered(rows, capabilities, size))} of {len(asked)}")
        asked_rows = sum(crossed.needs_of(row) <= capabilities for row in rows)
        page.append(f"| {name} | {asked_rows} | {counts[0]} | {counts[1]} |")
    page += ["", "Impossible together:", ""]
    for part, why in crossed.IMPOSSIBLE:
        page.append(f"- {' and '.join(f'{axis} {value}' for axis, value in part.items())}: {why}.")
    return {TABLE: table, PAGE: "\n".join([*page, ""])}


if __name__ == "__main__":
    raise SystemExit(write_or_compare(made, __doc__))
