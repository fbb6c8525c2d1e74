"""Writes a run file into reports/published with what its readers there need: verdicts, failures, skips and seconds.

Collectives, distances, losses and the seconds of single activities are dropped; ``shortened`` of a record names what
is. Run as ``python docs/publish.py RUN NAME`` in the repository's root; NAME ends in ``.json.gz``.
"""

from __future__ import annotations

import gzip
import json
import pathlib
import sys

PUBLISHED = pathlib.Path(__file__).parents[1] / "reports/published"
_DROPPED = ("collectives", "distances", "losses")


def main(source: str, name: str) -> int:
    """Write the file.

    Args:
        source: the path of a complete run file.
        name: of the new file.
    """
    run = json.loads(pathlib.Path(source).read_text())
    for case in run["cases"]:
        case.pop("spent", None)
        case |= {field: type(case[field])() for field in _DROPPED}
        case["shortened"] = list(_DROPPED)
    # The same content gives the same bytes, so that git sees no change where there is none.
    text = json.dumps(run, separators=(",", ":")).encode()
    (PUBLISHED / name).write_bytes(gzip.compress(text, mtime=0))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
