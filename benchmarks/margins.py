"""How near correct runs came to what the numerics allow, from run files: the measurement behind the constants.

    python benchmarks/margins.py reports/published/*.gz

For each stage: the comparisons whose distances were kept (the worst of each stage and step of a
case), the largest error of the sharded run in ulps, the largest share of the allowance that any
used, and the largest quotient of the sharded run's error and the baseline's where the sharded run
was off by more than the slack. The last line is the sentence that harness/parity/numerics.py quotes.
"""

from __future__ import annotations

import collections
import gzip
import json
import pathlib
import sys
from typing import Any


def distances(paths: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The kept distances of all passing cases, by stage."""
    found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for path in paths:
        content = pathlib.Path(path).read_bytes()
        for case in json.loads(gzip.decompress(content) if path.endswith(".gz") else content)["cases"]:
            if case["verdict"] == "pass":
                for distance in case["distances"]:
                    found[distance["stage"]].append(distance)
    return found


def summary(kept: dict[str, list[dict[str, Any]]]) -> str:
    """Return the sentence about all stages together."""
    items = [item for stage in kept.values() for item in stage]
    used = max(item["sharded_ulps"] / item["allowed_ulps"] for item in items)
    scalars = max(item["sharded_ulps"] for stage in ("loss", "total norm") for item in kept.get(stage, []))
    return (
        f"None of the {len(items):,} distances recorded there used more than {used:.2f} of the allowed error, and no "
        f"loss or total norm was off by more than {scalars:.1f} ulps."
    )


def main() -> None:
    """Print one line a stage, and the summary."""
    kept = distances(sys.argv[1:])
    if not kept:
        sys.exit(f"no passing case with distances in {sys.argv[1:]}: name run files, as reports/published/*.gz")
    print(f"{'stage':<22}{'kept':>6}{'worst ulps':>12}{'of allowed':>12}{'x baseline':>12}")
    for stage, items in kept.items():
        used = max(item["sharded_ulps"] / item["allowed_ulps"] for item in items)
        # A baseline that hit the oracle exactly makes any quotient; it is measured as half an ulp, its resolution.
        beyond = [i["sharded_ulps"] / max(i["baseline_ulps"], 0.5) for i in items if i["sharded_ulps"] > 8]
        worst = max(item["sharded_ulps"] for item in items)
        print(f"{stage:<22}{len(items):>6}{worst:>12.1f}{used:>12.2f}{max(beyond, default=0.0):>12.2f}")
    print(summary(kept))


if __name__ == "__main__":
    main()
