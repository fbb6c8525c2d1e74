"""Adapters of a reference of which one place is edited: bugs that had lived until a case was written for them.

They lie in the division of gradients, in dtypes, in settings that are taken back, in prefetching, in evaluation, in
names and in errors.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    # The division of gradients.
    "replicas-not-divided": Edit(
        "per_parameter.reduction:Reducer._division",
        "divide.divide(dtype, mesh.size, mesh.replicate_size, **extra)",
        "divide.divide(dtype, mesh.size, **extra)",
    ),
    "divided-by-the-root-of-shards": Edit(
        "common.divide:divide", "before = _near_square_root(divisor)", "before = _near_square_root(shard_size)"
    ),
    "divided-before": Edit("common.divide:divide", "before = _near_square_root(divisor)", "before = divisor"),
    "divided-after": Edit("common.divide:divide", "before = _near_square_root(divisor)", "before = 1"),
    "not-divided-before": Edit(
        "per_parameter.reduction:Reducer._reduce_scatter", "    divide.scale(contributions, division.before)\n", ""
    ),
    "not-divided-after": Edit(
        "per_parameter.reduction:Reducer._finish", "        divide.scale(total.shards, division.after)\n", ""
    ),
    "divided-again-by-replicas": Edit(
        "per_parameter.reduction:Reducer._finish",
        "divide.scale(total.shards, division.after)",
        "divide.scale(total.shards, division.after * (group.mesh.replicate_size if group.mesh.size == 1 else 1))",
    ),
    "half-range-is-wide": Edit(
        "common.divide:divide", "if dtype in _WIDE_RANGE:", "if dtype in (*_WIDE_RANGE, torch.float16):"
    ),
    # The norm of gradients of several dtypes.
    "norms-in-half": Edit(
        "common.norm:_norms", "torch.promote_types(tensor.dtype, torch.float32) for tensor", "tensor.dtype for tensor"
    ),
    "shares-in-float32": Edit("common.norm:local_share", "norm.to(device, torch.float64)", "norm.to(device).float()"),
    "norm-in-the-first-dtype": Edit(
        "common.clip:clip_grad_norm_",
        "(grad.dtype for grad in grads), torch.float32)",
        "[min((grad.dtype for grad in grads), key=lambda dtype: dtype.itemsize)])",
    ),
    "one-dtype-scaled": Edit(
        "common.clip:_scale",
        "    for (device, _), members in by_kind.items():",
        "    for (device, _), members in [*by_kind.items()][:1]:",
    ),
    "kinds-by-device": Edit(
        "common.clip:_scale",
        "by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)",
        "by_kind[tensor.device, None] = [tensor]",
    ),
    "shares-overwritten": Edit(
        "common.clip:clip_grad_norm_",
        "by_groups.setdefault(sharding_groups(grad), []).append(grad)",
        "by_groups[sharding_groups(grad)] = [one for one in grads if one.dtype == grad.dtype]",
    ),
    # Values that stay gathered over an optimizer's step.
    "stale-values-kept": Edit(
        "per_parameter.unit:Unit._root_pre_forward", "        group.drop_stale()\n", "        pass\n"
    ),
    "stale-smaller-shards-kept": Edit(
        "per_parameter.group:ParamGroup.drop_stale",
        "self.residence is not Residence.SHARDED",
        "self.residence is Residence.UNSHARDED",
    ),
    "steps-not-counted": Edit(
        "per_parameter.shards:Shards.version", "return counts +", "return 0 * counts if self.params else counts +"
    ),
    "gather-in-flight-kept": Edit(
        "per_parameter.group:ParamGroup.drop_stale", "self._pending is not None or self.residence", "self.residence"
    ),
    "cast-while-gathered": Edit("per_parameter.unit:Unit.reshard", "        self.group.reshard()\n", ""),
    # Names and places of parameters.
    "second-name-keeps-the-original": Edit(
        "per_parameter.construct:owners_of", "module._parameters.items()", "module.named_parameters(recurse=False)"
    ),
    "named-after-the-checks": Edit(
        "per_parameter.lazy_init:ensure",
        """_name(unit.modules[0], units)
    _check_shared_params(units)
    check_groups([other.group for other in units if other.group is not None])
""",
        """_check_shared_params(units)
    check_groups([other.group for other in units if other.group is not None])
    _name(unit.modules[0], units)
""",
    ),
    "state-dicts-of-units-alone": Edit(
        "per_parameter.unit:Unit.register",
        "dict.fromkeys(owner.module for param in params for owner in param.owners)",
        "self.modules",
    ),
    "held-past-the-module": Edit(
        "common.owner:Owner.hold", "type(module).__setattr__ is nn.Module.__setattr__", "True"
    ),
    "call-does-not-wait": Edit("per_parameter.module:FSDPModule.unshard", "    handle.wait()\n", ""),
    "handle-does-not-wait": Edit(
        "per_parameter.module:UnshardHandle.wait", "        self._unit.wait_for_unshard()\n", ""
    ),
    "default-mesh-of-one": Edit(
        "per_parameter.mesh:default_mesh",
        "(dist.get_world_size(),)",
        '(dist.get_world_size(), 1), mesh_dim_names=("a", "b")',
    ),
    "frozen-reduced-as-zeros": Edit(
        "per_parameter.reduction:take",
        "group.options.reduce_unused and param.sharded.requires_grad",
        "group.options.reduce_unused",
    ),
    "unit-waits-for-all-again": Edit(
        "per_parameter.unit:Unit.pre_forward", "    if not self.to_run:\n", "    if True:\n"
    ),
    "one-rank-is-no-whole": Edit(
        "per_parameter.mesh:after_forward", "        _warn_about_one()\n        return KEEP", "        return FREE"
    ),
    # Dtypes and divisions.
    "integers-cast": Edit(
        "per_parameter.shards:Shards._gather_layout",
        "param.compute_dtype for param",
        "param._param_dtype or param.dtype for param",
    ),
    "output-of-a-method-as-it-is": Edit(
        "per_parameter.module:_run_as_forward",
        "return unit.post_forward(module, args, method(*args, **kwargs))",
        "output = method(*args, **kwargs); unit.post_forward(module, args, output); return output",
    ),
    "pending-sums-in-the-dtype-of-compute": Edit(
        "per_parameter.reduction:_local_grad", "grad = cast(DTensor, grad.to(dtype))", "pass"
    ),
    "two-dtypes-packed": Edit(
        "per_parameter.reduction:_pack", "if len({grad.dtype for grad in filled}) > 1:", "if False:"
    ),
    "extensions-in-the-dtype-of-shards": Edit(
        "per_parameter.shards:Shards.finish_unsharded",
        "finish(param, param.compute_dtype)",
        "finish(param, param.dtype)",
    ),
    "zeros-in-the-dtype-of-shards": Edit(
        "per_parameter.reduction:zero_grad", "dtype=param.compute_dtype", "dtype=param.dtype"
    ),
    "cast-loses-unreduced-gradients": Edit(
        "per_parameter.param:ShardedParam.make_unsharded", "    if grad is not None:\n", "    if False:\n"
    ),
    "factor-of-three": Edit("common.divide:divide", "divisor / before", "divisor // before"),
    "method-runs-sharded": Edit(
        "per_parameter.module:_run_as_forward", "args, kwargs = unit.pre_forward(module, args, kwargs)", "pass"
    ),
    # Errors.
    "negative-size-taken": Edit("per_parameter.mesh:after_forward", "value < 1 or ", ""),
    "norm-of-nothing": Edit("common.clip:clip_grad_norm_", "if not grads:", "if False:"),
    "infinite-norm-accepted": Edit("common.clip:clip_grad_norm_", "not math.isfinite(", "math.isnan("),
    "failed-forward-counts": Edit(
        "common.order:OrderCheck.begin",
        "        self._first.clear()  # of a first forward that raised\n",
        "        pass\n",
    ),
    "ranks-of-the-group": Edit("common.order:OrderCheck._compare_ranks", "rank {ranks[index]} {", "rank {index} {"),
    # Settings.
    "root-ungathers-all": Edit(
        "per_parameter.module:FSDPModule.set_unshard_in_backward", "recurse=False", "recurse=True"
    ),
    "sync-leaves-all-reduce": Edit(
        "per_parameter.module:FSDPModule.set_requires_gradient_sync",
        "        group.options.all_reduce_grads = requires_gradient_sync\n",
        "",
    ),
    # Prefetching.
    "first-place-of-two": Edit("per_parameter.unit:_pop_index", "forward_indices.pop()", "forward_indices.pop(0)"),
    "one-unit-skipped": Edit("per_parameter.unit:prefetch_previous", "index - 1]", "index - 2]"),
    "prefetched-in-vain": Edit(
        "per_parameter.unit:Unit._complete_forward",
        "if not torch.is_grad_enabled() or tensors_requiring_grad(output):",
        "if True:",
    ),
    # Units of two dtypes.
    "narrow-first": Edit(
        "per_parameter.layout:build_layout", "key=lambda index: -dtypes[index].itemsize", "key=lambda _: 0"
    ),
    "elements-for-bytes": Edit(
        "per_parameter.layout:build_layout", "chunk * (dtypes[index].itemsize // unit.itemsize)", "chunk"
    ),
    # Containers.
    "late-fields-not-seen": Edit(
        "common.containers:map_tensors", "if hasattr(value, field.name)", "if field.init and hasattr(value, field.name)"
    ),
    # NaN.
    "nan-left-out-of-the-norm": Edit(
        "common.norm:finish", "        value = torch.where(has_nan > 0, math.nan, value)\n", "        pass\n"
    ),
}

FLAT = {
    "flat-stale-values-kept": Edit(
        "flat.group:FlatGroup.is_stale", "self._version() != self._gathered_version or ", ""
    ),
    "flat-one-unit-skipped": Edit(
        "flat.unit:IterationContext.prefetch_previous",
        "_prefetch(previous, ahead=ahead)",
        "_prefetch(self.forward_order[index - 2](), ahead=ahead)",
    ),
    "flat-prefetched-in-vain": Edit("flat.unit:FlatUnit.post_forward", "bool(tensors_requiring_grad(output))", "True"),
    # What modules show between forward and backward, and between microbatches.
    "flat-unsharded-shown-after-forward": Edit(
        "flat.unit:FlatUnit.post_forward", "            self.group.shards.register()\n", "            pass\n"
    ),
    "flat-kept-shown-after-backward": Edit(
        "flat.unit:FlatUnit._finish_backward", "    else:\n        self.group.shards.register()\n", ""
    ),
    "flat-unreduced-not-shown": Edit(
        "flat.unit:FlatUnit._end_of_backward", "    self._show_unsharded_gradients()\n", ""
    ),
    "flat-dropped-comes-back": Edit(
        "flat.reduction:Gradients.hide_unsharded", "if aside is not None and not dropped:", "if aside is not None:"
    ),
    "flat-one-dropped-is-kept": Edit("flat.reduction:Gradients.hide_unsharded", "if dropped and kept:", "if False:"),
    "flat-inner-context-ends-all": Edit(
        "flat.module:FullyShardedDataParallel.no_sync", "unit.syncs = syncs", "unit.syncs = True"
    ),
    "flat-new-data-lost": Edit("flat.shards:FlatShards.adopt", "            place.copy_(held.detach())\n", ""),
    # Wrapping by hand.
    "flat-wrapping-goes-on": Edit(
        "wrap:enable_wrap",
        "    try:\n        yield\n    finally:\n        _enabled.reset(token)",
        "    yield\n    _enabled.reset(token)",
    ),
    "flat-overrides-lost": Edit("wrap:wrap", "{**kwargs, **wrap_overrides}", "{**wrap_overrides, **kwargs}"),
    "flat-norm-in-float32": Edit(
        "flat.reduction:clip_grad_norm",
        "wide = reduce(torch.promote_types, [grad.dtype for grad in grads], torch.float32)",
        "wide = torch.float32",
    ),
    "flat-replicas-not-divided": Edit("flat.reduction:Reducer._division", ", self._group.ranks.replicate_size)", ")"),
    "flat-not-divided-before": Edit(
        "flat.reduction:Reducer._reduce_scatter", "    divide.scale(contributions, division.before)\n", ""
    ),
    "flat-not-divided-after": Edit(
        "flat.reduction:Reducer._finish",
        "            divide.scale(shard, division.after)\n",
        "            pass\n",
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})
