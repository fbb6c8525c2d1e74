"""Writes a run file into reports/published without the measurements of cases whose verdict is no surprise.

Run as ``python docs/publish.py RUN NAME`` in the repository's root; ``NAME`` ends in ``.json.gz``. Of cases without an
unexpected failure, the collectives, distances, losses and seconds of each activity are left out, and ``shortened``
names them, as in a record that was too large. A file of that form has at most 120 kB for each implementation.
"""

import gzip
import json
import sys
from typing import Any

from generating import ROOT

from shardproof.jsonfiles import load
from shardproof.runfile import RunFileError, parse_run

_MEASURED = ("collectives", "distances", "losses", "spent")
_EXPECTED = ("pass", "unsupported", "unmet", "expected-fail")


def slim(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a run file without the measurements of cases whose verdict is no surprise."""

    def without(record: dict[str, Any]) -> dict[str, Any]:
        emptied = {name: type(record[name])() for name in _MEASURED if name in record}
        return {**record, **emptied, "shortened": sorted({*record.get("shortened", ()), *emptied})}

    cases = [without(one) if one["verdict"] in _EXPECTED else one for one in data["cases"]]
    # By id: the order in which they end, which workers mix, is a third of the packed file.
    return {**data, "cases": sorted(cases, key=lambda one: (one["id"], one["implementation"]))}


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
