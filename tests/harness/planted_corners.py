"""Adapters of a reference of which one place is edited, where no case had looked before.

They lie in classes of containers, in named dimensions of one mesh, in the clipping of some parameters and in whole
parameters.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    # Containers.
    "dict-of-a-script-changed": Edit("common.containers:_rebuild_dict", "copy.copy(old)", "old"),
    "list-of-a-script-changed": Edit("common.containers:_rebuild_sequence", "copy.copy(old)", "old"),
    "dataclass-of-a-script-changed": Edit("common.containers:_rebuild_dataclass", "copy.copy(old)", "old"),
    "class-of-dicts-lost": Edit("common.containers:_rebuild_dict", "copy.copy(old)", "dict(old)"),
    "class-of-lists-lost": Edit("common.containers:_rebuild_sequence", "copy.copy(old)", "list(old)"),
    "class-of-tuples-lost": Edit("common.containers:_rebuild_sequence", "type(old)(items)", "tuple(items)"),
    "frozen-fields-set": Edit("common.containers:_rebuild_dataclass", "object.__setattr__", "setattr"),
    "keys-left-behind": Edit(
        "common.containers:map_tensors",
        "if isinstance(value, dict):",
        "if isinstance(value, dict) and not dataclasses.is_dataclass(value):",
    ),
    # Named dimensions.
    "names-of-dimensions-ignored": Edit("per_parameter.mesh:data_parallel_mesh", "if dims is None:", "if True:"),
    "shards-over-named-replicas": Edit(
        "per_parameter.mesh:data_parallel_mesh",
        "(dims.replicate_names, dims.shard_names)",
        "(dims.shard_names, dims.replicate_names)",
    ),
    "named-replicas-sharded": Edit("per_parameter.mesh:data_parallel_mesh", "sharded=bool(dims.shard_names), ", ""),
    "names-by-letters": Edit(
        "per_parameter.options:_names", "(value,) if isinstance(value, str) else tuple(value)", "tuple(value)"
    ),
    "shards-over-the-first-dimension": Edit(
        "per_parameter.param:_spmd_spec", "placements[first] = shard", "placements[0] = shard"
    ),
    "strided-by-earlier-dimensions": Edit("per_parameter.param:_spmd_spec", ", start=first", ""),
    "cut-again": Edit(
        "per_parameter.param:_cut_spmd", "if not isinstance(old.placements[index], Replicate):", "if False:"
    ),
    "named-replicas-in-any-order": Edit(
        "per_parameter.mesh:data_parallel_mesh", "    if part.ndim == 2:\n        check_replicas(part)\n", ""
    ),
    "no-dimension-named": Edit(
        "per_parameter.options:DataParallelMeshDims.__post_init__",
        "self.shard is None and self.replicate is None",
        "False",
    ),
    # Clipping.
    "one-tensor-by-rows": Edit(
        "common.clip:clip_grad_norm_",
        "[parameters] if isinstance(parameters, torch.Tensor) else list(parameters)",
        "list(parameters)",
    ),
    "first-one-scaled": Edit("common.clip:_scale", "for member in members:", "for member in members[:1]:"),
}

FLAT = {
    # Whole parameters.
    "flat-first-applied-is-the-root": Edit(
        "flat.module:FullyShardedDataParallel.apply", "construct.undo(self._unit)", "pass"
    ),
    "flat-buffers-of-wrappers": Edit(
        "flat.module:FullyShardedDataParallel.named_buffers", "self._shown_name(name), buffer", "name, buffer"
    ),
    "flat-whole-is-thawed": Edit(
        "flat.summon:_register_whole", "(view.detach(), requires_grad=wanted)", "(view.detach())"
    ),
    "flat-first-rank-keeps-changes": Edit("flat.summon:_check", "if writeback and rank0_only:", "if False:"),
    "flat-whole-in-a-forward": Edit("flat.summon:_check", "if unit.phase is not Phase.IDLE:", "if False:"),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})
