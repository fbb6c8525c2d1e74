"""Adapters of a reference of which one place is edited: corners of containers and hooks, of evaluations and of layout.

Empty parameters, inference mode, smaller shards, outputs of model libraries, and collectives of a script's own.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    # Where the numbers lie.
    "empty-columns-in-no-piece": Edit("per_parameter.layout:build_layout", "max(blocks, 1)", "blocks"),
    "targets-of-inference": Edit(
        "per_parameter.layout:UnshardedBuffer.targets",
        "torch.inference_mode(False), torch.no_grad()",
        "torch.no_grad()",
    ),
    "all-move-with-one": Edit("per_parameter.shards:Shards.refresh", "left < len(self.params) or ", ""),
    "cast-by-size": Edit(
        "common.gather_input:ready_to_gather",
        "shard.dtype == output.dtype",
        "shard.dtype.itemsize == output.dtype.itemsize",
    ),
    "added-at-the-start-of-a-block": Edit("common.views:remember", "int(buffer.storage_offset())", "0"),
    # Evaluations.
    "smaller-shards-used-again": Edit(
        "per_parameter.group:ParamGroup.to_sharded", "        self._smaller = None\n", ""
    ),
    "smaller-shards-never-stale": Edit(
        "per_parameter.group:ParamGroup.drop_stale",
        "self.residence is not Residence.SHARDED",
        "self.residence is Residence.UNSHARDED",
    ),
    "evaluations-stay-in-the-order": Edit(
        "per_parameter.unit:Unit._root_post_forward", "if not torch.is_grad_enabled():", "if False:"
    ),
    # Forward and backward.
    "prefetched-all-the-same": Edit(
        "per_parameter.group:ParamGroup.unshard",
        "if phase is Phase.PRE_BACKWARD and",
        "if self.phase is Phase.PRE_BACKWARD and",
    ),
    "refused-once": Edit(
        "per_parameter.lazy_init:ensure",
        "    check_groups([other.group for other in units if other.group is not None])\n    _join(unit, units)",
        "    _join(unit, units)\n    check_groups([other.group for other in units if other.group is not None])",
    ),
    "attributes-not-set": Edit(
        "common.owner:Owner.hold", "if type(module).__setattr__ is nn.Module.__setattr__:", "if True:"
    ),
    "hook-lost-with-the-view": Edit(
        "common.hooks:_hook", "if tensor._base is not None and tensor._base.grad_fn is not None:", "if False:"
    ),
    "inputs-once": Edit(
        "common.hooks:call_after_backward",
        "tensors = tensors_requiring_grad(inputs)",
        "tensors = list(dict.fromkeys(tensors_requiring_grad(inputs)))",
    ),
    "graphs-dropped": Edit(
        "common.modes:check_plain", "if grad.requires_grad:", "if grad.requires_grad and torch.is_grad_enabled():"
    ),
    # Containers.
    "attributes-before-keys": Edit(
        "common.containers:map_tensors",
        "    if isinstance(value, dict):\n",
        "    if isinstance(value, dict) and not dataclasses.is_dataclass(value):\n",
    ),
    "made-anew": Edit(
        "common.containers:_rebuild_dataclass",
        "    new = copy.copy(old)\n",
        "    return dataclasses.replace(old, **changed)\n",
        "    return dataclasses.replace(old, **changed)",
    ),
    # Life.
    "units-held-by-units": Edit(
        "per_parameter.lazy_init:_join",
        "root.iteration.units = units",
        "root.iteration.units = root.iteration.kept = units",
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER})
