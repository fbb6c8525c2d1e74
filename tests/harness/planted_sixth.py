"""Adapters of a reference of which one place is edited: what ran before, beside or in between, and what is set together.

Units of several modules, replicas, microbatches that use other parameters than the one before, roots in a plain module.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    # K04
    "first-of-several-not-gathered": Edit(
        "per_parameter.unit:Unit.post_forward",
        "hooks.call_before_backward(self._pre_backward, output)",
        "pass",
    ),
    # K06
    "first-gathers-the-last-ahead": Edit(
        "per_parameter.unit:prefetch_previous", "if index:", "if index is not None:"
    ),
    # K08
    "each-of-several-gathers-ahead": Edit(
        "per_parameter.unit:Unit.pre_forward",
        "    if entering:\n        prefetch(self.forward_prefetch",
        "    if True:\n        prefetch(self.forward_prefetch",
    ),
    # K10
    "refused-function-is-installed": Edit(
        "per_parameter.module:FSDPModule.set_all_reduce_hook",
        "        if stream is not None and group.mesh",
        "        group.options.all_reduce_hook = hook\n        if stream is not None and group.mesh",
    ),
    # K15
    "order-of-the-first-root": Edit(
        "per_parameter.module:validate_order",
        "for unit in units:\n        unit.iteration",
        "for unit in units[:1]:\n        unit.iteration",
    ),
    # K20
    "second-name-kept": Edit(
        "per_parameter.construct:owners_of",
        "in module._parameters.items():",
        "in module.named_parameters(recurse=False):",
    ),
    # K24
    "hooks-get-the-replicas": Edit(
        "per_parameter.mesh:ShardMesh.shard_dim_mesh", "_dim_names(self.mesh)[-1]", "_dim_names(self.mesh)[0]"
    ),
    # K27
    "frozen-get-zeros": Edit(
        "per_parameter.reduction:take", " and param.sharded.requires_grad", ""
    ),
    # K29
    "waiting-not-completed": Edit(
        "per_parameter.reduction:Reducer.reduce",
        "completes_partial = self._partial is not None and group.options.all_reduce_grads",
        "completes_partial = False",
    ),
    # K30
    "waiting-added-to-another": Edit(
        "per_parameter.reduction:Reducer._with_partial",
        "partial.params == summed.params and partial.layout.dtype == summed.layout.dtype",
        "partial.layout == summed.layout",
    ),
    # K31
    "hooks-not-run-on-kept": Edit(
        "per_parameter.reduction:Accumulator.add",
        "        buffer.add_(shards)\n",
        "        buffer.add_(shards)\n        return is_copying\n",
    ),
    # K33
    "average-by-an-equal-factor": Edit(
        "per_parameter.reduction:Reducer._division",
        "if options.force_sum:",
        "if options.force_sum and options.divide_factor != mesh.size * mesh.replicate_size:",
    ),
    # K35
    "frozen-shown-ignored": Edit(
        "per_parameter.param:ShardedParam.sync_requires_grad",
        "(self.sharded if shown.requires_grad == self._requires_grad else shown)",
        "self.sharded",
    ),
    # K37
    "frozen-while-gathered-undone": Edit(
        "per_parameter.group:ParamGroup.sync_requires_grad",
        "elif self.residence is Residence.UNSHARDED:\n        self._sync_unsharded()",
        "",
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER})
