"""Adapters of a reference of which one place is edited: a second look beside bugs that were planted before.

They lie in what a script replaces, saves and calls where it should not, in units of which not all ran, in tensors that
choose what is gathered, in rules and in functions of a script, and in what one rank has otherwise than the others.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    # Refusals.
    "frozen-scalars-taken": Edit(
        "per_parameter.construct:check_params", "if param.ndim == 0:", "if param.ndim == 0 and param.requires_grad:"
    ),
    "transposed-matrices-taken": Edit(
        "per_parameter.construct:check_params",
        "if not param.is_contiguous():",
        "if not param.is_contiguous() and param.ndim > 2:",
    ),
    "gathered-from-the-meta-device": Edit(
        "per_parameter.module:FSDPModule.unshard", "lazy_init.check_groups([unit.group])", "pass"
    ),
    "memory-of-a-script-replaced": Edit(
        "per_parameter.options:use_group_memory",
        '    _check_ours(options.reduce_scatter, GroupMemoryReduce, "reduce-scatter")\n',
        "",
    ),
    "any-unit-recovers": Edit("per_parameter.unit:Unit.reset", "if self.is_root is False:", "if False:"),
    "padding-not-asked-for": Edit(
        "per_parameter.param:Extension.inputs", "        self._check_padded(param, inputs, padded)\n", ""
    ),
    "meshes-without-names-beside-cut-layers": Edit(
        "common.mesh:concatenate", "if mesh.mesh_dim_names is None:", "if False:"
    ),
    "plain-parameters-taken": Edit("per_parameter.param:ShardedParam._check", "not isinstance(held, DTensor)", "False"),
    "streams-beside-replicas": Edit(
        "per_parameter.module:FSDPModule.set_all_reduce_hook",
        "stream is not None and group.mesh.replicas is not None",
        "False",
    ),
    # Layout.
    "strides-of-nothing": Edit("common.layout:contiguous_stride", "max(size[dim], 1)", "size[dim]"),
    "padding-left": Edit("per_parameter.param:Extension.finish", "if data.size() != param.size:", "if False:"),
    # What a script replaces.
    "replaced-in-one-place": Edit(
        "per_parameter.param:ShardedParam.adopt",
        "        self.sharded = held\n        self.register(held)\n",
        "        self.sharded = held\n",
    ),
    "second-place-left": Edit("per_parameter.param:ShardedParam.adopt", "elif len(self.owners) > 1:", "elif False:"),
    "steps-of-loaded-parameters-not-counted": Edit(
        "per_parameter.param:ShardedParam.adopt", "    hooks.count_steps_of(held)\n", ""
    ),
    # Reductions.
    "partial-sums-in-the-dtype-of-shards": Edit(
        "per_parameter.reduction:Reducer._with_partial",
        "self._layout(params, summed.layout.dtype)",
        "self._layout(params, params[0].dtype)",
    ),
    # Units of which not all ran, and what is gathered ahead.
    "gathers-in-vain-kept": Edit("per_parameter.unit:Unit._end_of_backward", "unit.group.drop_pending()", "pass"),
    "modules-to-come-kept": Edit("per_parameter.unit:Unit.reset", "        unit.to_run.clear()\n", ""),
    "modules-that-did-not-run-kept": Edit(
        "per_parameter.unit:Unit._root_post_forward", "            unit.to_run.clear()\n", ""
    ),
    "outermost-after-a-failed-forward": Edit(
        "per_parameter.unit:Unit.reset", "    self.iteration.forward_root = None\n", ""
    ),
    "a-unit-alone-stays-outermost": Edit(
        "per_parameter.unit:Unit.post_forward", "if self.iteration.forward_root is self:", "if self.is_root:"
    ),
    "evaluations-gather-nothing-ahead": Edit(
        "per_parameter.unit:Unit.pre_forward",
        "    if entering:\n        prefetch(",
        "    if entering and torch.is_grad_enabled():\n        prefetch(",
    ),
    "evaluations-stay-in-the-order": Edit(
        "per_parameter.unit:Unit._root_post_forward", "if not torch.is_grad_enabled():", "if False:"
    ),
    "ended-early-taken-to-compute": Edit(
        "per_parameter.unit:Unit._is_computing", " and self._begun_in != hooks.running_backward()", ""
    ),
    "factors-of-each-replica": Edit(
        "common.divide:divide",
        "divisor = world if factor is None else factor",
        "divisor = world if factor is None else factor * replicate_size",
    ),
}

FLAT = {
    # Options that exclude each other, and calls for which a model was not sharded.
    "flat-a-group-beside-a-mesh": Edit(
        "flat.ranks:resolve", "process_group is not None and device_mesh is not None", "False"
    ),
    "flat-units-of-both-kinds": Edit("flat.construct:initialize", "    _check_homogeneous(units)\n", ""),
    "flat-bounds-of-the-root": Edit(
        "flat.construct:_check_homogeneous", "{unit.options.limits_gathers for unit in units}", "set()"
    ),
    "flat-rules-beside-wrappers": Edit("flat.wrapping:wrap_inner", "if unit_of(child) is not None:", "if False:"),
    "flat-ignored-wrappers": Edit(
        "flat.wrapping:find_ignored", "any(unit_of(root) is not None for root in roots)", "False"
    ),
    "flat-forms-that-differ": Edit("flat.state_dict:settings_in", "if other != found[0]:", "if False:"),
    "flat-any-configuration": Edit("flat.options:settings_of", "type(optim_config) is not expected_optim", "False"),
    # Functions in the place of the reductions.
    "flat-second-function-taken": Edit(
        "flat.module:FullyShardedDataParallel.register_comm_hook",
        "if unit.reducer is not None and unit.reducer.comm_hook is not None:",
        "if False:",
    ),
    "flat-function-for-replicas-taken": Edit(
        "flat.module:FullyShardedDataParallel.register_comm_hook", "if unit.strategy.is_hybrid:", "if False:"
    ),
    "flat-function-gets-a-share-of-nothing": Edit(
        "flat.reduction:Reducer._call_hook", "if self._group.ranks.shard_group is None:", "if False:"
    ),
    "flat-half-divided-after-a-function": Edit(
        "flat.reduction:Reducer._finish", "        if self.comm_hook is None:\n", "        if True:\n"
    ),
    # What a script replaces.
    "flat-any-place-replaced": Edit(
        "flat.shards:FlatShards._held", "any(other is not held[0] for other in held[1:])", "False"
    ),
    "flat-larger-shapes-taken": Edit(
        "flat.shards:FlatShards.adopt", "held.size() != place.size()", "held.numel() < place.numel()"
    ),
    "flat-steps-of-the-replaced-not-counted": Edit("flat.shards:FlatShards.adopt", "        mark_managed(held)\n", ""),
    "flat-replaced-before-backward": Edit("flat.unit:FlatUnit._pre_backward", "    self._check_kept()\n", ""),
    "flat-frozen-parts-thawed": Edit("flat.shards:_plain", ", param.requires_grad)", ")"),
    # Whole parameters and gradients.
    "flat-saved-inside-whole-ones": Edit("flat.unit:FlatUnit.check_idle", "if self.is_summoned:", "if False:"),
    "flat-other-shapes-written-back": Edit(
        "flat.summon:_write_back", "value.size() != piece.size", "value.numel() != piece.size.numel()"
    ),
    "flat-unreduced-among-whole-ones": Edit("flat.summon:_reduced_shown", "    gradients.hide_unsharded()\n", ""),
    "flat-unreduced-hidden-by-a-cast": Edit("flat.summon:_conceal", "    unit.gradients.show_unsharded()\n", ""),
    "flat-any-unit-clips": Edit(
        "flat.module:FullyShardedDataParallel.clip_grad_norm_", "if not self.check_is_root():", "if False:"
    ),
    # State dicts.
    "flat-one-number-of-one-element": Edit("flat.optim_state:_is_laid_out", "value.dim() > 0 and ", ""),
    "flat-ignored-states-shared": Edit(
        "flat.optim_state:save", "{key: copy_of(value) for key, value in state.items()}", "dict(state)"
    ),
    "flat-fewer-parameters-on-a-rank": Edit(
        "flat.optim_state:save", "    check_same_params(table.managed_names(groups), process_group)\n", ""
    ),
    "flat-names-of-checkpointing": Edit("flat.optim_state:rekey", "clean(name)", "name"),
    "flat-numbers-of-the-first": Edit(
        "flat.optim_state:_one_for_all", "any(value != plain[0] for value in plain) or", ""
    ),
    "flat-ignored-have-no-number": Edit("flat.optim_state:load", "number += 1", "number += bool(place.saved)"),
    "flat-versions-of-wrappers": Edit("flat.state_dict:finish", "    _clean_metadata(found, prefix)\n", ""),
    # Orders, modules on the meta device and rules.
    "flat-order-of-a-failed-forward": Edit("flat.unit:FlatUnit.abandon_forward", "        self._forget_order()\n", ""),
    "flat-buffers-alone-not-made": Edit(
        "flat.construct:_is_on_meta",
        "buffer.is_meta for child in modules for buffer in child.buffers(recurse=False)",
        "False for child in modules",
    ),
    "flat-ignored-norm-wrapped": Edit(
        "flat.wrapping:_leave_out_of_mixed_precision", " and child not in ignored.modules", ""
    ),
    "flat-norm-remembers-its-dtype": Edit("flat.wrapping:_FloatInside.before", "    self._outside = None\n", ""),
    "flat-called-objects-do-not-recurse": Edit(
        "wrap:ModuleWrapPolicy.__call__", "return recurse or isinstance", "return isinstance"
    ),
    # Recomputations, values of the first rank, and conversions.
    "flat-ended-early-frees-all": Edit("flat.unit:FlatUnit.abandon_forward", "if hooks.in_backward():", "if False:"),
    "flat-recomputed-forwards-in-the-order": Edit(
        "flat.unit:FlatUnit.post_forward",
        "        if not hooks.in_backward():\n            self.iteration.record_forward(self.group)\n",
        "        self.iteration.record_forward(self.group)\n",
    ),
    "flat-buffers-of-units-not-sent": Edit(
        "flat.construct:_prepare", " if unit.options.synced for child in", " for child in"
    ),
    "flat-swapped-not-counted": Edit("flat.shards:FlatShards.adopt_flat", "    mark_managed(held)\n", ""),
    "flat-by-hand-within-by-hand": Edit("wrap:enable_wrap", "if _enabled.get() is not None:", "if False:"),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})
