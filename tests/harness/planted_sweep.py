"""Adapters of a reference of which one place is edited: what a sweep of one-place changes found to live.

Several parameters with hooks in one unit, and whole state dicts beside tensor parallelism.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    "memory-apart-for-the-last": Edit("per_parameter.shards:Shards._extended_input", "apart |= set(", "apart = set("),
    "dimensions-of-the-last": Edit(
        "per_parameter.shards:Shards._extended_input", "dims += [0] * len(inputs)", "dims = [0] * len(inputs)"
    ),
    "last-hook-not-called": Edit(
        "per_parameter.shards:Shards.finish_unsharded", "for param in self.params:", "for param in self.params[:-1]:"
    ),
}

FLAT = {
    "flat-own-columns-saved": Edit("flat.state_dict:whole_copy", "value.full_tensor()", "value.to_local().clone()"),
    "flat-states-of-own-columns-saved": Edit(
        "flat.optim_state:_whole_states",
        "else whole_copy(value)",
        "else getattr(value, '_local_tensor', value).detach().clone()",
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceFlatAdapter: FLAT, ReferenceAdapter: PER_PARAMETER})
