"""Adapters of a reference of which one place is edited: what optimizers, scalers, generators and buffers depend on."""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

_TWO_IF = "(1 + 2.0**-22 if {} else 1)"

PER_PARAMETER = {
    # Optimizers.
    "zeros-not-added-to": Edit(
        "per_parameter.reduction:Accumulator._add_views", "    if existing:\n", "    if False:\n"
    ),
    "buffer-added-to-by-half": Edit(
        "per_parameter.reduction:Accumulator.add", "buffer.add_(shards)", "buffer.add_(shards, alpha=0.5)"
    ),
    "thawed-not-reduced": Edit(
        "per_parameter.reduction:take",
        "for param in group.shards.params:",
        "trained = group.__dict__.setdefault('trained', [p for p in group.shards.params if p.sharded.requires_grad])\n"
        "    for param in trained:",
    ),
    "writes-not-noticed": Edit("per_parameter.group:ParamGroup.drop_stale", "if is_kept and", "if False and"),
    "local-writes-not-noticed": Edit(
        "per_parameter.shards:Shards.version", "param.sharded._version + param.local._version", "param.sharded._version"
    ),
    "fused-steps-not-noticed": Edit("per_parameter.shards:Shards.version", " + hooks.optimizer_steps()", ""),
    "gradients-placed-as-replicas": Edit(
        "per_parameter.reduction:Accumulator._add_views",
        "dtensor.with_dtype(param.spec, view.dtype)",
        "dtensor.spec_for(param.spec.mesh, [torch.distributed.tensor.Replicate()], view.size(), view.dtype)",
    ),
    "replaced-gradients-not-noticed": Edit(
        "common.views:Views.whole",
        "tensor is None or tensor is not made() or tensor.data_ptr() != address",
        "tensor is None",
    ),
    # Scalers.
    "infinities-removed": Edit(
        "per_parameter.reduction:Reducer._reduce_scatter",
        "divide.scale(contributions, division.before)",
        "contributions.nan_to_num_()",
    ),
    "infinities-removed-on-the-way-home": Edit(
        "per_parameter.reduction:Accumulator._to_home",
        '    if not self._offloads or shards.device.type == "cpu":\n',
        "    shards = shards.nan_to_num() if self._offloads else shards\n"
        '    if not self._offloads or shards.device.type == "cpu":\n',
    ),
    # Generators, buffers and bits.
    "a-number-for-each-gather": Edit(
        "per_parameter.group:ParamGroup._gather", "output = torch.empty(", "output = torch.rand("
    ),
    "a-number-for-each-recomputation": Edit(
        "per_parameter.unit:Unit.pre_forward",
        "        self._unshard_now()\n        return _cast_inputs",
        "        self._unshard_now(); torch.rand(1)\n        return _cast_inputs",
    ),
    "a-number-for-each-shard": Edit(
        "per_parameter.shards:Shards._new_buffer", "return torch.zeros(", "torch.rand(1); return torch.zeros("
    ),
    "buffers-of-the-first-rank": Edit(
        "per_parameter.unit:Unit.post_forward",
        "    return _cast_output(self._policy, output)",
        "    for buffer in module.buffers():\n        torch.distributed.broadcast(buffer, 0)\n"
        "    return _cast_output(self._policy, output)",
    ),
    "replicas-round-apart": Edit(
        "per_parameter.reduction:Reducer._finish",
        "divide.scale(total.shards, division.after)",
        "divide.scale(total.shards, division.after / "
        + _TWO_IF.format("group.mesh.replicas is not None and torch.distributed.get_rank(group.mesh.replicas)")
        + ")",
    ),
    "later-runs-round-apart": Edit(
        "per_parameter.reduction:Reducer._finish",
        "divide.scale(total.shards, division.after)",
        "divide.scale(total.shards, division.after / " + _TWO_IF.format("total.params[0].serial > 24") + ")",
        is_apart=True,
    ),
    # Precision.
    "reduced-in-the-dtype-of-autocast": Edit(
        "per_parameter.reduction:_common_dtype",
        "return dtypes.pop()",
        'return torch.bfloat16 if torch.is_autocast_enabled("cpu") else dtypes.pop()',
    ),
    "evaluation-not-cast": Edit(
        "per_parameter.unit:_cast_inputs", "if policy.param_dtype is None", "if not torch.is_grad_enabled()"
    ),
    "tensor-parallel-not-cast": Edit(
        "per_parameter.param:ShardedParam.__init__",
        "self._param_dtype = param_dtype",
        "self._param_dtype = None if cut.unsharded else param_dtype",
    ),
    "replicas-in-full-precision": Edit(
        "per_parameter.reduction:Reducer._finish",
        "collectives.all_reduce(total.shards, group.mesh.replicas, division.all_reduce_op, unit=group.label)",
        "wide = total.shards.float(); collectives.all_reduce(wide, group.mesh.replicas, division.all_reduce_op, "
        "unit=group.label); total.shards.copy_(wide)",
    ),
    "partial-sums-in-the-dtype-of-compute": Edit(
        "per_parameter.reduction:Reducer.reduce",
        "self._partial, done = total,",
        "self._partial, done = total._replace(shards=total.shards.bfloat16().to(total.shards.dtype)),",
    ),
    "reduce-dtype-of-the-first-unit": Edit(
        "per_parameter.reduction:_reduce_dtype",
        "group.precision.reduce_dtype or",
        'globals().setdefault("_first_dtype", group.precision.reduce_dtype) or',
    ),
    "shards-rounded-by-the-gather": Edit(
        "per_parameter.shards:Shards.gather_input",
        "        return source\n",
        "        return source.copy_(source.to(self.gather_layout.dtype))\n",
    ),
    # Reductions.
    "nan-removed": Edit(
        "per_parameter.reduction:_pack",
        "out=contributions.view(layout.world, -1))",
        "out=contributions.view(layout.world, -1)); contributions.nan_to_num_()",
    ),
    "reduction-adds-to-its-output": Edit(
        "per_parameter.reduction:Reducer._reduce_scatter",
        "collectives.reduce(output, contributions, process_group, division.reduce_op, unit=group.label)",
        "own = output.clone(); collectives.reduce(own, contributions, process_group, division.reduce_op, "
        "unit=group.label); output.mul_(0).add_(own)",
    ),
}

FLAT = {
    "flat-zeros-added-to-by-half": Edit(
        "flat.reduction:Gradients.add", "buffer.add_(reduced)", "buffer.add_(reduced, alpha=0.5)"
    ),
    "flat-thawed-only-at-first": Edit(
        "flat.group:FlatGroup._sync_requires_grad",
        "if self._buffer.leaf.requires_grad != self.shards.flat.requires_grad:",
        "if self._buffer.leaf.requires_grad and not self.shards.flat.requires_grad:",
    ),
    "flat-writes-not-noticed": Edit(
        "flat.group:FlatGroup.is_stale", "self._version() != self._gathered_version or ", ""
    ),
    "flat-writes-to-originals-not-noticed": Edit(
        "flat.group:FlatGroup._version", "[self.shards.flat, *self.shards.originals]", "[self.shards.flat]"
    ),
    "flat-fused-steps-not-noticed": Edit("flat.group:FlatGroup._version", " + hooks.optimizer_steps()", ""),
    "flat-replaced-gradients-not-noticed": Edit(
        "common.views:Views.whole",
        "tensor is None or tensor is not made() or tensor.data_ptr() != address",
        "tensor is None",
    ),
    "flat-replaced-data-not-noticed": Edit("common.views:Views.whole", " or tensor.data_ptr() != address", ""),
    "flat-infinities-removed": Edit(
        "flat.reduction:Reducer._reduce_scatter",
        "divide.scale(contributions, division.before)",
        "contributions.nan_to_num_()",
    ),
    "flat-a-number-for-each-gather": Edit(
        "flat.group:FlatGroup._gather", "    source = ready_to", "    torch.rand(1); source = ready_to"
    ),
    "flat-a-number-for-each-recomputation": Edit(
        "flat.unit:FlatUnit.pre_forward",
        "        self._unshard_now()\n        return self._cast_inputs",
        "        self._unshard_now(); torch.rand(1)\n        return self._cast_inputs",
    ),
    "flat-buffers-of-the-first-rank": Edit(
        "flat.unit:FlatUnit.post_forward",
        "    if self.group is not None:\n        # A re-entrant",
        "    for buffer in self.wrapper.buffers():\n        torch.distributed.broadcast(buffer, 0)\n"
        "    if self.group is not None:\n        # A re-entrant",
    ),
    "flat-replicas-round-apart": Edit(
        "flat.reduction:Reducer._finish",
        "divide.scale(shard, division.after)",
        "divide.scale(shard, division.after / "
        + _TWO_IF.format("replicas is not None and torch.distributed.get_rank(replicas)")
        + ")",
    ),
    "flat-reduced-in-the-dtype-of-autocast": Edit(
        "flat.reduction:Reducer.reduce",
        "grad.to(self.reduce_dtype or grad.dtype)",
        'grad.to(torch.bfloat16 if torch.is_autocast_enabled("cpu") else grad.dtype)',
    ),
    "flat-evaluation-not-cast": Edit(
        "flat.unit:FlatUnit._cast_inputs", "not self.in_full_precision", "self.wrapper.training"
    ),
    "flat-evaluation-gathers-low": Edit(
        "flat.unit:FlatUnit.choose_precision",
        "self.group.param_dtype = None if full else self.precision.param_dtype",
        "self.group.param_dtype = self.precision.param_dtype",
    ),
    "flat-training-after-evaluation-stays-full": Edit(
        "flat.unit:FlatUnit.choose_precision",
        "full = self.options.full_in_evaluation is not None and not module.training",
        "full = self.in_full_precision or (self.options.full_in_evaluation is not None and not module.training)",
    ),
    "flat-low-gradients-widened": Edit(
        "flat.reduction:Reducer._accumulate", "shard.dtype if self._keep_low_precision else flat.dtype", "flat.dtype"
    ),
    "flat-tensor-parallel-not-cast": Edit(
        "flat.group:FlatGroup.__init__",
        "self.param_dtype = param_dtype",
        "self.param_dtype = None if any(shards.specs) else param_dtype",
    ),
    "flat-flag-of-the-root-in-every-unit": Edit(
        "flat.unit:FlatUnit._cast_inputs",
        "precision.cast_root_forward_inputs if self.is_root else False",
        "precision.cast_root_forward_inputs",
    ),
    "flat-flag-of-the-root-ignored": Edit("flat.unit:FlatUnit._cast_inputs", "casts = wanted or", "casts ="),
    "flat-replicas-in-full-precision": Edit(
        "flat.reduction:Reducer._finish",
        "collectives.all_reduce(shard, replicas, division.all_reduce_op, unit=group.label)",
        "wide = shard.float(); collectives.all_reduce(wide, replicas, division.all_reduce_op, unit=group.label); "
        "shard.copy_(wide)",
    ),
    "flat-reduce-dtype-of-the-first-unit": Edit(
        "flat.reduction:Reducer.reduce",
        "grad.to(self.reduce_dtype or grad.dtype)",
        'grad.to(globals().setdefault("_first_dtype", self.reduce_dtype or grad.dtype))',
    ),
    "flat-shards-rounded-by-the-gather": Edit(
        "flat.group:FlatGroup._gather",
        "    if self.ranks.shard_group is None:\n",
        "    shard.copy_(shard.to(output.dtype))\n    if self.ranks.shard_group is None:\n",
    ),
    "flat-nan-removed": Edit(
        "flat.reduction:Reducer.reduce",
        "contributions = grad.to(self.reduce_dtype or grad.dtype)",
        "contributions = grad.to(self.reduce_dtype or grad.dtype).nan_to_num_()",
    ),
    "flat-reduction-adds-to-its-output": Edit(
        "flat.reduction:Reducer._reduce_scatter",
        "collectives.reduce(output, contributions, group.ranks.shard_group, division.reduce_op, unit=group.label)",
        "own = output.clone(); collectives.reduce(own, contributions, group.ranks.shard_group, division.reduce_op, "
        "unit=group.label); output.mul_(0).add_(own)",
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})
