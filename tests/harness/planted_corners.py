"""Adapters of a reference of which one place is edited, where no case had looked before.

They lie in classes of containers, in named dimensions of one mesh, in the clipping of some parameters, in refusals, in
optimizers that step in backward, in older state dicts and in modules that another library replicates.
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
    "dimensions-of-the-root-alone": Edit(
        "per_parameter.mesh:check_mesh",
        "if mesh.ndim not in (1, 2):",
        "if not {*(mesh.mesh_dim_names or ())} <= {*(mesh._get_root_mesh().mesh_dim_names or ())}:",
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
    # Refusals.
    "size-as-choice": Edit(
        "per_parameter.module:FSDPModule.set_reshard_after_forward",
        "isinstance(reshard_after_forward, bool)",
        "isinstance(reshard_after_forward, int)",
    ),
    "no-inputs-in-flight": Edit(
        "per_parameter.module:FSDPModule.set_reduce_scatter_max_input_buffers", "max_input_buffers < 1", "False"
    ),
    "half-an-input": Edit(
        "per_parameter.module:FSDPModule.set_reduce_scatter_max_input_buffers",
        " or not isinstance(max_input_buffers, int)",
        "",
    ),
    "no-unit-ahead": Edit("per_parameter.module:_groups_of", "if unit is None:", "if False:"),
    # Orders.
    "a-unit-alone-begins": Edit(
        "per_parameter.unit:Unit._root_pre_forward",
        "if self.is_root and self.iteration.order",
        "if self.iteration.order",
    ),
    "a-unit-alone-goes-on": Edit("common.order:OrderCheck.end", "    self._is_active = False\n", ""),
    # Layouts after forward, and what cannot be resharded to a part of the ranks.
    "smaller-shards-of-rows": Edit("per_parameter.group:_spec_of", "Shard(param.dim)", "Shard(0)"),
    "size-of-the-mesh-kept": Edit("per_parameter.mesh:after_forward", "if value == mesh.size:", "if False:"),
    "extensions-beside-each-other": Edit(
        "per_parameter.layout:UnshardedBuffer.__init__", "if index in apart:", "if False:"
    ),
    "extensions-resharded": Edit(
        "per_parameter.lazy_init:_check_smaller",
        "smaller is not None and kind",
        'smaller is not None and kind[:1] == "D"',
    ),
    "cut-parameters-resharded": Edit("per_parameter.lazy_init:_check_smaller", 'kind = "DTensor parameters"', "pass"),
    # Modules.
    "lists-do-not-compute": Edit(
        "per_parameter.construct:_check_module",
        "is_container and type(module).forward is nn.Module.forward",
        "is_container",
    ),
    "beside-an-ignored-one": Edit("per_parameter.construct:_is_ignored", "and all(param in", "and any(param in"),
    "one-unit-on-the-meta-device": Edit("per_parameter.lazy_init:check_groups", "if on_meta:", "if len(on_meta) > 4:"),
    # Recomputation of several units, gradients and hooks.
    "freed-while-recomputed": Edit(
        "per_parameter.unit:Unit._complete_forward", "if not hooks.in_backward():", "if True:"
    ),
    "factors-below-one-ignored": Edit("common.divide:scale", "if divisor != 1:", "if divisor > 1:"),
    "added-at-the-beginning": Edit("common.views:Views.whole", "(1,), self.start)", "(1,), 0)"),
    "shards-from-the-beginning": Edit("per_parameter.layout:shard_view", "int(buffer.storage_offset()) + ", ""),
    "first-hook-alone": Edit("common.hooks:post_accumulate_of", ".values())", ".values())[:1]"),
    "no-hook-without-rows": Edit(
        "per_parameter.reduction:Accumulator.add",
        "        hooks.run_post_accumulate(param.sharded)",
        "        param.local.numel() and hooks.run_post_accumulate(param.sharded)",
    ),
    "pending-sum-taken": Edit("common.clip:sharding_groups", "isinstance(placement, Partial)", "False"),
    "freed-by-gradients-of-a-forward": Edit(
        "per_parameter.unit:Unit._end_of_backward", "if unit._is_computing():", "if False:"
    ),
    "reentrant-not-ahead": Edit(
        "per_parameter.unit:Unit._complete_forward",
        "if not torch.is_grad_enabled() or tensors_requiring_grad(output):",
        "if tensors_requiring_grad(output):",
    ),
    # What parameters are cut into, and what is put in their place.
    "no-such-dimension-is-the-first": Edit(
        "per_parameter.param:_checked_dim",
        "        raise AssertionError(f",
        "        return 0\n        raise AssertionError(f",
    ),
    "placements-not-compared": Edit(
        "per_parameter.param:ShardedParam._check",
        "(held.size(), held.device_mesh, held.placements) != (size, spec.mesh, spec.placements)",
        "(held.size(), held.device_mesh) != (size, spec.mesh)",
    ),
    "sizes-not-compared": Edit(
        "per_parameter.param:ShardedParam._check",
        "(held.size(), held.device_mesh, held.placements) != (size, spec.mesh, spec.placements)",
        "(held.device_mesh, held.placements) != (spec.mesh, spec.placements)",
    ),
    "gathered-as-before-a-cast": Edit(
        "per_parameter.group:ParamGroup._copy_out", " or self._unsharded_layout is not self.shards.gather_layout", ""
    ),
    "older-hook-without-metadata": Edit(
        "per_parameter.param:Extension.inputs", "inputs, self._metadata = hook(mesh)\n", "inputs, _ = hook(mesh)\n"
    ),
    "hooks-get-the-replicas": Edit(
        "per_parameter.mesh:ShardMesh.shard_dim_mesh", "self.mesh if self.mesh.ndim == 1 else", "self.mesh if True else"
    ),
    "placement-not-looked-at": Edit(
        "per_parameter.param:cut",
        'raise ValueError(f"Invalid shard_placement_fn result: {placement} for parameter {name}")',
        "placement = None",
    ),
    "no-pieces-of-nothing": Edit("per_parameter.layout:build_layout", "max(blocks, 1)", "blocks"),
    "sharded-once-more": Edit("per_parameter.construct:_check_module", "if unit_of(module) is not None:", "if False:"),
    "ends-compared-among-some": Edit(
        "common.order:OrderCheck.end", "in dict.fromkeys(groups):", "in [*dict.fromkeys(groups)][:1]:"
    ),
    "load-keeps-a-gather": Edit(
        "per_parameter.unit:Unit._before_state_dict", "        self.group.drop_pending()\n", ""
    ),
    # Collectives of a script, and tensors that choose what travels.
    "input-at-the-first-place": Edit(
        "per_parameter.group:ParamGroup._gather",
        "own_part(output, source, mesh.rank)",
        "own_part(output, source, 0)",
    ),
    "sums-for-all-units": Edit(
        "per_parameter.module:FSDPModule.set_force_sum_reduction_for_comms",
        "_groups(recurse=False)",
        "_groups(recurse=True)",
    ),
    "extensions-cut-by-rows": Edit(
        "per_parameter.shards:Shards._cut_apart", "cut.data.size(cut.dim)", "cut.data.size(0)"
    ),
    "hooks-of-shards-of-before": Edit("per_parameter.shards:Shards.find_extensions", "        param.adopt()\n", ""),
    # What another library replicates.
    "replicated-is-sharded": Edit(
        "per_parameter.construct:_not_taken", '"replicate" in (registry_of(module) or ())', "False"
    ),
    "replicate-is-not-told": Edit(
        "per_parameter.construct:_mark_composable", "register(mark)(list(unit.modules))", "pass"
    ),
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
    "flat-whole-in-a-forward": Edit("flat.unit:FlatUnit.check_idle", "if self.phase is not Phase.IDLE:", "if False:"),
    "flat-gradients-on-the-cpu": Edit(
        "flat.summon:_check", "if with_grads and (offload_to_cpu or not use_orig):", "if False:"
    ),
    "flat-reduces-by-anything": Edit(
        "flat.module:FullyShardedDataParallel.register_comm_hook", "if not callable(hook):", "if False:"
    ),
    "flat-ignored-by-units-alone": Edit(
        "flat.wrapping:find_ignored", "        own.update(unit.options.ignored.params)\n", ""
    ),
    "flat-of-any-size": Edit(
        "flat.shards:FlatShards.adopt_flat", "if held.numel() != self.layout.shard_numel:", "if False:"
    ),
    # What cannot be sharded.
    "flat-replicas-by-themselves": Edit(
        "flat.ranks:_resolve_hybrid", "process_group is None and device_mesh is None and not has_policy", "False"
    ),
    "flat-replicas-on-any-mesh": Edit(
        "flat.ranks:_resolve_hybrid", "not isinstance(device_mesh, DeviceMesh) or device_mesh.ndim != 2", "False"
    ),
    "flat-integers": Edit("flat.shards:check_uniform", "not param.is_floating_point()", "False"),
    "flat-function-not-looked-at": Edit("flat.construct:materialize", "not callable(init)", "False"),
    "flat-ignored-by-one-option": Edit(
        "flat.wrapping:find_ignored", "modules is not None and states is not None", "False"
    ),
    "flat-classes-that-look-on": Edit(
        "flat.shards:set_tensor", "type(owner.module).__setattr__ is not nn.Module.__setattr__", "False"
    ),
    # Rules and functions of a script.
    "flat-any-answer": Edit("wrap:CustomPolicy._run_policy", "if not isinstance(answer, (bool, dict)):", "if False:"),
    "flat-function-divided-again": Edit(
        "flat.reduction:Reducer._finish", "    if self.comm_hook is None:\n", "    if True:\n"
    ),
    "flat-frozen-shown-with-gradients": Edit("flat.reduction:Gradients._wholes", " if param.requires_grad]", "]"),
    "flat-without-gradients-compared": Edit(
        "common.order:OrderCheck.begin", "training and torch.is_grad_enabled()", "training"
    ),
    "flat-recovers-while-recomputing": Edit(
        "flat.unit:FlatUnit.recover", "callback_queued and not hooks.in_backward()", "callback_queued"
    ),
    "flat-freed-by-gradients-of-a-forward": Edit(
        "flat.unit:FlatUnit._finish_backward", "if self.phase is Phase.FORWARD:", "if False:"
    ),
    "flat-unreduced-shown-in-backward": Edit(
        "flat.unit:FlatUnit._root_post_forward", "if not hooks.in_backward():\n", "if True:\n"
    ),
    "flat-some-are-all": Edit(
        "flat.reduction:Gradients.add",
        "    self._last = _Last(",
        "    given = [one.param for one in holders]\n    self._last = _Last(",
    ),
    # Optimizers in backward.
    "flat-optimizers-of-flat-parameters": Edit(
        "flat.construct:initialize", 'hasattr(group.shards.flat, "_in_backward_optimizers")', "False"
    ),
    "flat-gradients-after-their-step": Edit(
        "flat.reduction:_step_in_backward", "            optimizer.zero_grad(set_to_none=True)\n", ""
    ),
    # State dicts of optimizers.
    "flat-older-on-all-ranks": Edit(
        "flat.module:FullyShardedDataParallel.full_optim_state_dict",
        "rank0_only=rank0_only, off",
        "rank0_only=False, off",
    ),
    "flat-older-not-sent": Edit(
        "flat.module:FullyShardedDataParallel.scatter_full_optim_state_dict", "rank0_only=True, ", ""
    ),
    "flat-numbers-of-sorted-names": Edit("flat.optim_state:_rename", "enumerate(names)}", "enumerate(sorted(names))}"),
    "flat-names-of-an-optimizer": Edit(
        "flat.optim_state:Table.state_of",
        "given.get(number, given.get(self._names.get(id(param), self.place(param).names[0])))",
        "given.get(number)",
    ),
    "flat-names-with-wrappers": Edit(
        "flat.optim_state:save", "clean(key) if isinstance(key, str) else key: state", "key: state"
    ),
    "flat-shapes-for-numbers": Edit(
        "flat.optim_state:_one_for_all", "if any(isinstance(value, torch.Tensor) for value in plain):", "if False:"
    ),
    "flat-dtype-of-the-first": Edit(
        "flat.optim_state:_joined", "{part.tensor.dtype for part in parts}", "{part.tensor.dtype for part in parts[:1]}"
    ),
    "flat-local-not-loaded": Edit(
        "flat.state_dict:load",
        "if unit.state_dict_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:",
        "if False:",
    ),
    # Units found by a rule.
    "flat-first-place-alone": Edit("flat.wrapping:_replace", "if child is None:", "if child is None or child in seen:"),
    "flat-numbers-of-steps-shared": Edit("flat.optim_state:_whole_states", "copy_of(kind)", "kind"),
    "flat-loaded-numbers-shared": Edit(
        "flat.optim_state:_shard_state", "found[key] = copy_of(value)", "found[key] = value"
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})
