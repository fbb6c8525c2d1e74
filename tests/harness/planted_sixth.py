"""Adapters of a reference of which one place is edited: what ran in between, replicas, and settings that meet others.

Units of several modules, several roots, microbatches that use another parameter of the same size, refused functions.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    # Units of several modules, and the order of units.
    "each-of-several-gathers-ahead": Edit(
        "per_parameter.unit:Unit.pre_forward",
        "    if entering:\n        prefetch(self.forward_prefetch",
        "    if True:\n        prefetch(self.forward_prefetch",
    ),
    "first-gathers-the-last-ahead": Edit("per_parameter.unit:prefetch_previous", "if index:", "if index is not None:"),
    "order-of-the-first-root": Edit(
        "per_parameter.module:validate_order", "for unit in units:\n", "for unit in units[:1]:\n"
    ),
    # Replicas.
    "hooks-given-the-replicas": Edit(
        "per_parameter.mesh:ShardMesh.shard_dim_mesh", "_dim_names(self.mesh)[-1]", "_dim_names(self.mesh)[0]"
    ),
    "refused-function-kept": Edit(
        "per_parameter.module:FSDPModule.set_all_reduce_hook",
        "        if stream is not None and group.mesh",
        "        group.options.all_reduce_hook = hook\n        if stream is not None and group.mesh",
    ),
    "partial-added-to-another": Edit(
        "per_parameter.reduction:Reducer._with_partial",
        "partial.params == summed.params and partial.layout.dtype == summed.layout.dtype",
        "partial.layout == summed.layout",
    ),
    # Settings, and what is there already.
    "averages-by-an-equal-factor": Edit(
        "per_parameter.reduction:Reducer._division",
        "if options.force_sum:",
        "if options.force_sum and options.divide_factor != mesh.size * mesh.replicate_size:",
    ),
    "hooks-not-run-on-kept-gradients": Edit(
        "per_parameter.reduction:Accumulator.add",
        "        buffer.add_(shards)\n",
        "        buffer.add_(shards)\n        return is_copying\n",
    ),
    "frozen-shown-is-undone": Edit(
        "per_parameter.param:ShardedParam.sync_requires_grad",
        "(self.sharded if shown.requires_grad == self._requires_grad else shown)",
        "self.sharded",
    ),
    "frozen-shown-is-not-saved": Edit("per_parameter.group:ParamGroup.to_sharded", "self.sync_requires_grad()", "pass"),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER})
