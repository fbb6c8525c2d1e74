"""Writes a run file into reports/published without the measurements of cases whose verdict is no surprise.

Run as ``python docs/publish.py RUN NAME`` in the repository's root; ``NAME`` ends in ``.json.gz``. Of cases without an
unexpected failure, the collectives, distances, losses and seconds of each activity are left out, and ``shortened``
names them, as in a record that was too large; their durations are in whole milliseconds. A file of that form has at
most 150 kB for each implementation. Of a run that was ended, ``RUN.partial``, the cases that it did not reach are left
out, with what ended it as the reason. The directories of users become ``~``, as in files that a run writes today, and
the digest is that of what is left.
"""

import gzip
import json
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a clone need not be installed

from shardproof.door import load
from shardproof.jsonfiles import mapped
from shardproof.reports.results import HOMES
from shardproof.runfile import digest_of, fingerprint, parse_run

_MEASURED = ("collectives", "distances", "losses", "spent")
_EXPECTED = ("pass", "unsupported", "unmet", "expected-fail")


def slim(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a run file without the measurements of cases whose verdict is no surprise."""

    def without(record: dict[str, Any]) -> dict[str, Any]:
        emptied = {name: type(record[name])() for name in _MEASURED if name in record}
        shortened = sorted({*record.get("shortened", ()), *emptied})
        return {**record, **emptied, "seconds": round(record["seconds"], 3), "shortened": shortened}

    cases = [without(one) if one["verdict"] in _EXPECTED else one for one in data["cases"]]
    # By id: the order in which they end, which workers mix, is a third of the packed file.
    return {**data, "cases": sorted(cases, key=lambda one: (one["id"], one["implementation"]))}


def completed(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a run that was ended as that of one which leaves out the cases without a record."""
    if data["end"]["complete"]:
        return data
    reason = f"the run was ended: {data['end']['reason']}"
    missing = [{"id": id_, "implementation": name, "reason": reason} for name, id_ in parse_run(data).not_run]
    end = {**data["end"], "complete": True, "reason": "", "problems": []}
    digest = digest_of(map(fingerprint, data["cases"]))
    return {**data, "left_out": [*data["left_out"], *missing], "end": end, "digest": digest}


def main() -> None:
    """Write one file."""
    source, name = sys.argv[1:]
    given = completed(load(source, lambda data: data))
    data = mapped(slim(given), lambda text, _: re.sub(HOMES, "~", text))
    if written := given.get("digest"):
        found, data["digest"] = (digest_of(map(fingerprint, one["cases"])) for one in (given, data))
        if written != found:
            sys.exit(f"{source}: the digest is not that of the records")
    parse_run(data)
    target = ROOT / "reports/published" / name
    # Without the time of writing, so that equal runs are equal files.
    with target.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
        packed.write(json.dumps(data, separators=(",", ":")).encode())
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
