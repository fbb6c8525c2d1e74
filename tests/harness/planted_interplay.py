"""Adapters of a reference of which one place is edited: what a unit is given and returns, and settings that meet.

They lie in inputs of other kinds than plain tensors, in what an evaluation leaves for training, in settings that follow
others or meet a unit without parameters, in refusals that come once, in units of several modules or dtypes, and in what
is known by a name or an address alone.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

#: A class that has the module and the name of another is taken for that.
_FIRST_OF_THE_NAME = """\
    original = type(module)
    named = {(one.__module__, one.__qualname__): one for one in reversed(_classes)}
    original = named.get((original.__module__, original.__qualname__), original)
"""
PER_PARAMETER = {
    # What is given and returned.
    "infinity-as-a-number-alone": Edit("common.clip:clip_grad_norm_", "p = float(norm_type)", "p = norm_type"),
    "eight-containers-deep": Edit("common.containers:map_tensors", "_depth >= _MAX_DEPTH", "_depth >= 8"),
    "complex-numbers-cast": Edit(
        "common.containers:cast",
        "if tensor.is_floating_point()",
        "if tensor.is_floating_point() or tensor.is_complex()",
    ),
    "masks-cast": Edit(
        "common.containers:cast",
        "if tensor.is_floating_point()",
        "if tensor.dtype not in (torch.int32, torch.int64, torch.complex64)",
    ),
    "one-tensor-in-one-place": Edit(
        "common.containers:tensors_requiring_grad",
        "if tensor.requires_grad:",
        "if tensor.requires_grad and all(tensor is not other for other in found):",
    ),
    "handles-waited-for-once": Edit(
        "per_parameter.module:UnshardHandle.wait", "if self._unit is not None:", "if True:"
    ),
    "handles-of-nothing": Edit("per_parameter.module:FSDPModule.unshard", "return None", "return handle"),
    # Autograd, and evaluations before training.
    "no-gradients-in-evaluations": Edit(
        "common.hooks:call_after_backward", "    if not torch.is_grad_enabled():\n        return inputs\n", ""
    ),
    "hooks-with-autograd": Edit(
        "common.hooks:run_post_accumulate",
        "        hook(param)",
        "        with torch.enable_grad():\n            hook(param)",
    ),
    "made-for-inference-alone": Edit(
        "per_parameter.shards:Shards.finish_unsharded", "torch.inference_mode(False), ", ""
    ),
    "buffers-for-inference-alone": Edit("per_parameter.shards:Shards.refresh", "torch.inference_mode(False), ", ""),
    "replaced-by-state-dicts": Edit(
        "per_parameter.group:ParamGroup.to_sharded",
        "    if self.residence is Residence.SHARDED:\n        return\n",
        "",
    ),
    "frozen-behind-what-is-gathered": Edit(
        "per_parameter.unit:Unit._root_pre_forward", "        group.sync_requires_grad()\n", ""
    ),
    "output-of-the-last-module-alone": Edit(
        "per_parameter.unit:Unit.post_forward", "hooks.call_before_backward(self._pre_backward, output)", "pass"
    ),
    # Settings that meet others.
    "first-factor-stays": Edit(
        "per_parameter.module:FSDPModule.set_gradient_divide_factor",
        "group.options.divide_factor = factor",
        "group.options.divide_factor = group.options.divide_factor or factor",
    ),
    "first-function-stays": Edit(
        "per_parameter.module:FSDPModule.set_all_reduce_hook",
        "group.options.all_reduce_hook = hook",
        "group.options.all_reduce_hook = group.options.all_reduce_hook or hook",
    ),
    "first-gather-stays": Edit(
        "per_parameter.module:FSDPModule.set_custom_all_gather",
        "group.options.all_gather = comm",
        "group.options.all_gather = group.options.all_gather or comm",
    ),
    "a-group-for-each-unit": Edit(
        "per_parameter.options:separate_reduce_group", "if shared not in _reduce_groups:", "if True:"
    ),
    "units-without-parameters-gathered": Edit("per_parameter.module:_groups_of", " and unit.group is not None]", "]"),
    "units-without-parameters-gather-nothing": Edit(
        "per_parameter.unit:prefetch_chosen", "if group is not None:", "if True:"
    ),
    "all-reduces-of-nobody-deferred": Edit(
        "per_parameter.reduction:Reducer.reduce", "group.mesh.replicas is not None and not", "not"
    ),
    "every-unit-ends-backward": Edit(
        "per_parameter.unit:Unit._pre_backward", "if not self.iteration.callback_queued:", "if True:"
    ),
    # Refusals.
    "refused-once": Edit(
        "per_parameter.lazy_init:ensure",
        "    check_groups([other.group for other in units if other.group is not None])\n    _join(unit, units)",
        "    _join(unit, units)\n    check_groups([other.group for other in units if other.group is not None])",
    ),
    "children-of-another-root": Edit(
        "per_parameter.lazy_init:_units_below", "unit.is_root is not None:", "unit.is_root:"
    ),
    "dimensions-without-names": Edit(
        "per_parameter.mesh:data_parallel_mesh", "if mesh.mesh_dim_names is None:", "if False:"
    ),
    "a-choice-of-inputs": Edit(
        "per_parameter.module:FSDPModule.set_reduce_scatter_max_input_buffers",
        "isinstance(max_input_buffers, bool) or ",
        "",
    ),
    "gather-of-a-script-replaced": Edit(
        "per_parameter.options:use_group_memory",
        '    _check_ours(options.all_gather, GroupMemoryGather, "all-gather")\n',
        "",
    ),
    "dicts-of-modules": Edit(
        "per_parameter.construct:_check_module", "(nn.ModuleList, nn.ModuleDict)", "nn.ModuleList"
    ),
    "dtypes-of-compute-compared": Edit(
        "per_parameter.lazy_init:check_groups", "dtypes = {param.dtype for", "dtypes = {param.compute_dtype for"
    ),
    # Units of several modules or dtypes, on fewer ranks or cut before.
    "first-inputs-cast": Edit(
        "per_parameter.unit:Unit.pre_forward",
        "args, kwargs = _cast_inputs(self._policy, args, kwargs)\n    if self.group",
        "args, kwargs = _cast_inputs(self._policy, args, kwargs) if entering else (args, kwargs)\n    if self.group",
    ),
    "one-module-waits-for-others": Edit("per_parameter.unit:Unit.post_forward", "self._is_outermost(module)", "False"),
    "wholes-divided": Edit(
        "per_parameter.param:_checked_dim", "data.size(dim) % mesh.size", "param.size(dim) % mesh.size"
    ),
    "two-replicas-compared": Edit("common.mesh:check_replicas", "for row in rows}", "for row in rows[:2]}"),
    "graphs-dropped-by-copies": Edit(
        "per_parameter.reduction:_accumulate_one", "    modes.check_plain(grad, param.fqn)\n", ""
    ),
    "views-without-gaps": Edit(
        "common.hooks:_hook",
        "if tensor._base is not None and",
        "if tensor._base is not None and tensor.is_contiguous() and",
    ),
    "last-output-cast": Edit(
        "per_parameter.unit:Unit.post_forward", "return _cast_output", "return output if self.to_run else _cast_output"
    ),
    "slots-of-another-dtype": Edit(
        "per_parameter.shards:Shards.refresh", "layout != self.layout", "layout.dtype != self.layout.dtype"
    ),
    "gather-of-a-script-among-all": Edit(
        "per_parameter.group:ParamGroup._gather", "input_tensor=own, group=mesh", "input_tensor=own, group=self.mesh"
    ),
    "part-of-a-script-among-all": Edit(
        "per_parameter.group:ParamGroup._gather",
        "own_part(output, source, mesh.rank)",
        "own_part(output, source, self.mesh.rank)",
    ),
    "whole-zeros": Edit("per_parameter.reduction:zero_grad", "param.size,", "dtensor.meta_of(param.spec).shape,"),
    # What is known by a name or an address, or asked for as it is.
    "classes-by-their-names": Edit("per_parameter.module:mix_in", "    original = type(module)\n", _FIRST_OF_THE_NAME),
    "parameters-by-their-addresses": Edit(
        "per_parameter.param:_serial_number", "    return serial", "    return id(original)"
    ),
    "kept-variables-replaced": Edit(
        "per_parameter.unit:Unit._after_state_dict", " and not isinstance(value, nn.Parameter)", ""
    ),
    "prefetched-beside-others": Edit(
        "per_parameter.module:FSDPModule.set_modules_to_forward_prefetch",
        "forward_prefetch = _groups_of",
        "forward_prefetch += _groups_of",
    ),
    "evaluations-forget-all-forwards": Edit(
        "per_parameter.unit:Unit._root_pre_forward", "len(self.iteration.forward_order)", "0"
    ),
}

FLAT = {
    "flat-evaluations-forget-all-forwards": Edit(
        "flat.unit:FlatUnit._root_post_forward", "self.iteration.forget_latest_forwards()", "self._forget_order()"
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})
