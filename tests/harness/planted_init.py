"""Adapters of a reference of which one place is edited: refusals, values, ranks, placements, hooks and policies."""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    # What is refused.
    "scalars-taken": Edit("per_parameter.construct:check_params", "if param.ndim == 0:", "if False:"),
    "changed-before-the-check": Edit(
        "per_parameter.construct:check_params",
        "    for param, name in params.items():\n",
        "    for param, name in params.items():\n        param.data = param.data * 1.5\n",
    ),
    "three-dimensions-taken": Edit("per_parameter.mesh:check_mesh", "if mesh.ndim not in (1, 2):", "if False:"),
    "sizes-that-do-not-divide-taken": Edit(
        "per_parameter.mesh:after_forward", "value < 1 or mesh.size % value != 0", "value < 1"
    ),
    "two-dtypes-taken": Edit("per_parameter.lazy_init:check_groups", "if len(dtypes) > 1:", "if False:"),
    "root-before-the-checks": Edit(
        "per_parameter.lazy_init:ensure",
        "    units = _units_below(unit)",
        "    unit.is_root = True\n    units = _units_below(unit)",
    ),
    "uneven-dimensions-taken": Edit(
        "per_parameter.param:_checked_dim", "if dim > 0 and data.size(dim) % mesh.size != 0:", "if False:"
    ),
    "shared-by-two-units-taken": Edit(
        "per_parameter.lazy_init:_check_shared_params", "if param.serial in seen:", "if False:"
    ),
    # Ranks and values.
    "rank-of-the-world": Edit(
        "per_parameter.mesh:ShardMesh.__post_init__",
        "self.mesh.get_local_rank(last) if self.sharded",
        "dist.get_rank() % self.mesh.size(last) if self.sharded",
    ),
    "orders-not-compared": Edit("common.mesh:check_replicas", "if len(orders) > 1:", "if False:"),
    "new-values-not-noticed": Edit(
        "per_parameter.param:ShardedParam.adopt",
        "if is_same and self.slot is not None and local is self.slot and local.data_ptr() == self._slot_pointer:",
        "if is_same and self.slot is not None:",
    ),
    "three-ranks-not-padded": Edit(
        "common.layout:chunk_rows", "return -(-rows // world)", "return -(-rows // (world & ~1))"
    ),
    "experts-averaged-over-their-own": Edit(
        "per_parameter.reduction:Reducer._division", "if options.divide_factor is not None:", "if False:"
    ),
    # Placements.
    "other-dimension-as-the-first": Edit(
        "per_parameter.layout:UnshardedBuffer._target", "if slot.blocks == 1:", "if slot.blocks >= 1:"
    ),
    "cut-in-the-order-of-the-mesh": Edit("per_parameter.param:_shard", "if split_factor > 1", "if False"),
    "shard-before-replicas": Edit(
        "per_parameter.mesh:ShardMesh.placements",
        "return (*(Replicate() for _ in range(self.mesh.ndim - 1)), shard)",
        "return (shard, *(Replicate() for _ in range(self.mesh.ndim - 1)))",
    ),
    # Extensions.
    "one-hook-taken": Edit("per_parameter.param:has_hooks", "if before != after:", "if False:"),
    "extended-never-freed": Edit("per_parameter.param:Extension.free", "if storage.size() != 0:", "if False:"),
    "extended-not-filled-again": Edit(
        "per_parameter.param:Extension.finish",
        "hook(outputs, self._metadata, dtype, out=param.unsharded)",
        "pass",
    ),
}

FLAT = {
    # What is refused.
    "flat-two-dtypes-taken": Edit("flat.shards:check_uniform", "if param.dtype != first.dtype:", "if False:"),
    "flat-three-dimensions-taken": Edit("flat.ranks:resolve", "if device_mesh.ndim != 1:", "if False:"),
    # Ranks and values.
    "flat-group-of-all": Edit(
        "flat.ranks:resolve", "process_group if process_group is not None else _default_group()", "_default_group()"
    ),
    "flat-groups-swapped": Edit(
        "flat.ranks:_resolve_hybrid", "group, replicas = process_group", "replicas, group = process_group"
    ),
    "flat-orders-not-compared": Edit("flat.ranks:_resolve_hybrid", "        check_replicas(device_mesh)\n", ""),
    "flat-nothing-reset": Edit(
        "flat.construct:_reset", "            module.reset_parameters()\n", "            pass\n"
    ),
    "flat-function-for-the-unit-alone": Edit(
        "flat.construct:materialize", "            init(child)\n", "            init(module)\n"
    ),
    "flat-first-rank-of-each-replica": Edit(
        "flat.construct:sync_states", "dict.fromkeys([ranks.across, ranks.group])", "[ranks.group]"
    ),
    "flat-buffers-not-sent": Edit("flat.construct:_prepare", "[*dict.fromkeys(buffers), *params()]", "params()"),
    "flat-third-rank-misplaced": Edit(
        "flat.layout:FlatLayout.span",
        "begin, end = rank * self.shard_numel, (rank + 1) * self.shard_numel",
        "begin = (rank ^ (rank >> 1)) * self.shard_numel; end = begin + self.shard_numel",
    ),
    # Policies.
    "flat-inner-units-counted": Edit("flat.wrapping:_run_callable", "_numel(params - taken)", "_numel(params)"),
    "flat-leaves-wrapped": Edit(
        "flat.wrapping:_run_callable",
        "            return set()\n",
        "            targets[current] = dict(arguments)\n            return params\n",
    ),
    "flat-last-child-alone-counted": Edit(
        "flat.wrapping:_run_callable", "taken |= known[child]", "taken = known[child]"
    ),
    "flat-ignored-counted": Edit("flat.wrapping:_run_callable", " if param not in ignored.params", ""),
    "flat-ignored-looked-into": Edit("flat.wrapping:_run_callable", "if child not in ignored.modules:", "if True:"),
    "flat-ignored-chosen": Edit(
        "wrap:CustomPolicy._run_policy", "        if module in ignored_modules:\n            continue\n", ""
    ),
    "flat-options-forgotten": Edit(
        "wrap:CustomPolicy._run_policy", "**(answer if isinstance(answer, dict) else {})", ""
    ),
    "flat-chosen-classes-alone-looked-into": Edit("wrap:transformer_auto_wrap_policy", "recurse or ", ""),
    "flat-batch-norm-in-low-precision": Edit(
        "flat.wrapping:_leave_out_of_mixed_precision", ', "mixed_precision": None}', "}"
    ),
    "flat-batch-norm-returns-its-own": Edit(
        "flat.wrapping:_leave_out_of_mixed_precision", "        child.register_forward_hook(casts.after)\n", ""
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})
