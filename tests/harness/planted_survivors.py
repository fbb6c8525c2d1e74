"""Adapters of a reference of which one place is edited: bugs that the suites let live until a case was written for them.

They lie in the division of gradients, in dtypes, in settings that are taken back, in prefetching and in evaluation.
"""

from __future__ import annotations

import dataclasses

from shardproof.harness.adapters.base import Adapter
from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, Edited

PER_PARAMETER = {
    # The division of gradients.
    "replicas-not-divided": Edit(
        "per_parameter.reduction:Reducer._division",
        "divide.divide(dtype, mesh.size, mesh.replicate_size, **extra)",
        "divide.divide(dtype, mesh.size, **extra)",
    ),
    "divided-by-the-root-of-shards": Edit(
        "common.divide:divide", "before = _near_square_root(divisor)", "before = _near_square_root(shard_size)"
    ),
    "divided-before": Edit(
        "common.divide:divide", "before = _near_square_root(divisor)", "before = divisor"
    ),
    "divided-after": Edit("common.divide:divide", "before = _near_square_root(divisor)", "before = 1"),
    "not-divided-before": Edit(
        "per_parameter.reduction:Reducer._reduce_scatter", "    divide.scale(contributions, division.before)\n", ""
    ),
    "not-divided-after": Edit(
        "per_parameter.reduction:Reducer._finish", "        divide.scale(total.shards, division.after)\n", ""
    ),
    "divided-again-by-replicas": Edit(
        "per_parameter.reduction:Reducer._finish",
        "divide.scale(total.shards, division.after)",
        "divide.scale(total.shards, division.after * (group.mesh.replicate_size if group.mesh.size == 1 else 1))",
    ),
    "half-range-is-wide": Edit(
        "common.divide:divide", "if dtype in _WIDE_RANGE:", "if dtype in (*_WIDE_RANGE, torch.float16):"
    ),
}

FLAT = {
    "flat-replicas-not-divided": Edit(
        "flat.reduction:Reducer._division", ", self._group.ranks.replicate_size)", ")"
    ),
    "flat-not-divided-before": Edit(
        "flat.reduction:Reducer._reduce_scatter", "    divide.scale(contributions, division.before)\n", ""
    ),
    "flat-not-divided-after": Edit(
        "flat.reduction:Reducer._finish",
        "            divide.scale(shard, division.after)\n",
        "            pass\n",
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS: dict[str, type[Adapter]] = {
    name: type(
        name.replace("-", "_"),
        (Edited, base),
        {
            "name": name,
            "edit": edit,
            "traits": dataclasses.replace(base.traits, isolation="adapter"),
            "__module__": __name__,
        },
    )
    for base, edits in ((ReferenceAdapter, PER_PARAMETER), (ReferenceFlatAdapter, FLAT))
    for name, edit in edits.items()
}
globals().update({adapter.__name__: adapter for adapter in ADAPTERS.values()})
