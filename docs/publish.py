"""Writes a run file into reports/published without what nobody reads there: what passing cases measured.

Run as ``python docs/publish.py RUN NAME`` in the repository's root; ``NAME`` ends in ``.json.gz``. Of cases that pass
or skip, the collectives, distances and losses are left out, and ``shortened`` names them, as in a record that was too
large. A file of that form has about 90 kB for each implementation.
"""

from __future__ import annotations

import gzip
import json
import sys
from typing import Any

from generating import ROOT

sys.path.insert(0, str(ROOT))  # a clone need not be installed

from shardproof.jsonfiles import load
from shardproof.runfile import RunFileError, parse_run

_MEASURED = ("collectives", "distances", "losses")


def slim(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a run file without what its cases without a failure measured."""
    return {**data, "cases": [one if one["failure"] else _without(one) for one in data["cases"]]}


def _without(record: dict[str, Any]) -> dict[str, Any]:
    emptied = {name: type(record[name])() for name in _MEASURED}
    return {**record, **emptied, "shortened": sorted({*record.get("shortened", ()), *_MEASURED})}


def main() -> None:
    """Write one file."""
    source, name = sys.argv[1:]
    data = slim(load(source, lambda data: data, RunFileError))
    parse_run(data)
    target = ROOT / "reports/published" / name
    # Without the time of writing, so that equal runs are equal files.
    with target.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
        packed.write(json.dumps(data, separators=(",", ":")).encode())
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
