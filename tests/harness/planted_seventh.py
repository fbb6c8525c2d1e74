"""Adapters of a reference of which one place is edited: corners of containers and hooks, of evaluations and of layout.

Parameters without elements, dtypes of one size, state dicts that follow the parameters, dataclasses that set fields of
their own, inference mode, smaller shards and prefetches.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    # Where the numbers lie.
    "columns-of-nothing": Edit("per_parameter.layout:build_layout", "max(blocks, 1)", "blocks"),
    "targets-for-inference-alone": Edit(
        "per_parameter.layout:UnshardedBuffer.targets", "torch.inference_mode(False), ", ""
    ),
    "all-move-with-one": Edit("per_parameter.shards:Shards.refresh", "left < len(self.params) or ", ""),
    "cast-by-size": Edit(
        "common.gather_input:ready_to_gather",
        "shard.dtype == output.dtype",
        "shard.dtype.itemsize == output.dtype.itemsize",
    ),
    # Reductions.
    "shards-that-waited-not-summed": Edit(
        "per_parameter.reduction:Reducer.reduce",
        "total = self._with_partial(summed)\n"
        "        if group.mesh.replicas is not None and not group.options.all_reduce_grads:",
        "waited = self._partial is not None\n"
        "            total = self._with_partial(summed)\n"
        "        if group.mesh.replicas is not None and (waited or not group.options.all_reduce_grads):",
    ),
    "graphs-dropped-without-autograd": Edit(
        "common.modes:check_plain", "if grad.requires_grad:", "if torch.is_grad_enabled() and grad.requires_grad:"
    ),
    # Forward and backward.
    "smaller-shards-outlive-a-step": Edit(
        "per_parameter.group:ParamGroup.to_sharded", "    self._smaller = None\n", ""
    ),
    "prefetched-all-the-same": Edit(
        "per_parameter.group:ParamGroup.unshard",
        "if phase is Phase.PRE_BACKWARD and",
        "if self.phase is Phase.PRE_BACKWARD and",
    ),
    "hook-lost-with-the-view": Edit(
        "common.hooks:_hook", "if tensor._base is not None and tensor._base.grad_fn is not None:", "if False:"
    ),
    "one-input-for-each-tensor": Edit(
        "common.hooks:call_after_backward",
        "tensors = tensors_requiring_grad(inputs)",
        "tensors = list(dict.fromkeys(tensors_requiring_grad(inputs)))",
    ),
    # Containers.
    "dataclasses-made-anew": Edit(
        "common.containers:_rebuild_dataclass",
        "    new = copy.copy(old)\n",
        "    return dataclasses.replace(old, **changed)\n",
    ),
    # Who owns whom.
    "one-name-can-be-copied": Edit(
        "per_parameter.unit:Unit._after_state_dict", "for owner in param.owners:", "for owner in param.owners[:1]:"
    ),
    "units-own-units": Edit(
        "per_parameter.lazy_init:_join",
        "root.iteration.units = units",
        "root.iteration.units = root.iteration.kept = units",
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER})
