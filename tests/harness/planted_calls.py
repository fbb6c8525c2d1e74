"""Adapters of a reference of which one place is edited: what a wrapper answers, warns of, and does after an error.

Most lie in what calls return and in arguments that they do not look at, in warnings that are lost, in parameters that
are parts of larger tensors, in whole parameters, and in what an exception or an interrupt leaves.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    "infinite-in-float64": Edit("common.norm:local_share", ", posinf=math.inf", ""),
}

_WRAPPER = "flat.module:FullyShardedDataParallel"

FLAT = {
    # What a wrapper says of itself, and arguments.
    "flat-numbers-of-items-alone": Edit(f"{_WRAPPER}.__getitem__", "wrapped[key]", "wrapped[int(key)]"),
    "flat-form-that-was-set": Edit(f"{_WRAPPER}.set_state_dict_type", "return before", "return settings"),
    "flat-loaded-is-nothing": Edit(f"{_WRAPPER}.optim_state_dict_to_load", "return found", "return {}"),
    "flat-group-ignored": Edit(f"{_WRAPPER}.optim_state_dict", "form, group)", "form, None)"),
    "flat-parameters-ignored": Edit(
        f"{_WRAPPER}.shard_full_optim_state_dict", "optim if optim is not None else optim_input", "optim"
    ),
    "flat-own-states-alone": Edit(
        "flat.optim_state:save", "optim.state_dict() if given is None else given", "optim.state_dict()"
    ),
    "flat-groups-needed": Edit("flat.optim_state:save", 'if "param_groups" not in given:', "if False:"),
    "flat-states-saved-as-parameters": Edit("flat.optim_state:_whole_states", ", dtype=kind.dtype", ""),
    "flat-states-joined-as-parameters": Edit("flat.optim_state:_joined", ", dtype=parts[0].tensor.dtype", ""),
    "flat-mesh-forgotten": Edit("flat.ranks:resolve", ", mesh=device_mesh", ""),
    "flat-mesh-of-replicas-forgotten": Edit("flat.ranks:_resolve_hybrid", ", mesh=device_mesh", ""),
    "flat-root-has-one-setting": Edit(
        "flat.unit:FlatUnit._cast_inputs",
        "casts = wanted or precision.cast_forward_inputs",
        "casts = wanted if self.is_root else precision.cast_forward_inputs",
    ),
    "flat-norm-by-keyword-stays-low": Edit(
        "flat.wrapping:_FloatInside.before",
        "args, kwargs = map_tensors(self._widen, (args, kwargs))",
        "args = map_tensors(self._widen, args)",
    ),
    "flat-version-of-the-wrapper": Edit("flat.state_dict:_clean_metadata", "metadata[prefix[:-1]] = own", "pass"),
    # Layout.
    "flat-parts-from-the-beginning": Edit("flat.layout:flattened", "(1,))", "(1,), 0)"),
    "flat-gaps-kept": Edit("flat.layout:stride_of", "if is_dense(tensor):", "if True:"),
    # Refusals and warnings.
    "flat-replicas-on-the-cpu": Edit("flat.summon:_check", "not unit.group.shards.is_sharded", "False"),
    "flat-roots-under-a-root": Edit(
        "flat.construct:initialize", "if other is not unit and other.is_root:", "if False:"
    ),
    "flat-made-of-anything": Edit("flat.construct:_reset", "        raise\n", ""),
    "flat-dicts-unmentioned": Edit("flat.construct:build", "(nn.ModuleList, nn.ModuleDict)", "nn.ModuleList"),
    "flat-replicas-unmentioned": Edit("flat.construct:_settle", "if found.group.size() > 1:", "if False:"),
    "flat-one-rank-unmentioned": Edit(
        "flat.construct:_settle",
        "        warnings.warn(\n"
        '            f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.", '
        "stacklevel=4\n        )\n",
        "",
    ),
    "flat-ignored-root-unmentioned": Edit("flat.wrapping:find_ignored", "if module in found:", "if False:"),
    "flat-norms-unmentioned": Edit("flat.wrapping:_leave_out_of_mixed_precision", "if found:", "if False:"),
    "flat-frozen-unmentioned": Edit("flat.wrapping:_report_frozen", "    warnings.warn(message, stacklevel=6)\n", ""),
    "flat-frozen-counted-twice": Edit("flat.wrapping:_check_frozen", "        taken.update(params)\n", ""),
    "flat-copies-unmentioned": Edit("flat.summon:_check", "if offload_to_cpu and not rank0_only:", "if False:"),
    "flat-older-argument-unmentioned": Edit(
        "flat.optim_state:warn_optim_input", "if optim_input is not None:", "if False:"
    ),
    # Whole parameters.
    "flat-whole-ones-are-others": Edit(
        "flat.summon:_register_whole", "if shards.use_orig and not isinstance(view, DTensor):", "if False:"
    ),
    "flat-written-onto-themselves": Edit(
        "flat.summon:_write_back", "if not _lies_in_place(shards, index, value):", "if True:"
    ),
    "flat-no-attributes-afterwards": Edit("flat.summon:_register_shards", "    group.register_unsharded()\n", ""),
    "flat-gradients-in-another-order": Edit(
        "flat.summon:WholeGradients.take_back",
        "shards.like_part(index, shards.cut_one(index, dtensor.local_part(whole)))",
        "shards.cut_one(index, dtensor.local_part(whole)).view_as(grad)",
    ),
    # After an error.
    "flat-whole-after-an-error": Edit(
        "flat.summon:_unit_full",
        "        try:\n            yield\n        finally:\n            try:\n                if writeback:\n",
        "        yield\n        if True:\n            try:\n                if writeback:\n",
    ),
    "flat-exposed-after-an-error": Edit(
        "flat.summon:flat_params_exposed",
        "    try:\n        yield\n    finally:\n        for unit in units:\n            _conceal(unit)",
        "    yield\n    for unit in units:\n        _conceal(unit)",
    ),
    "flat-interrupts-unseen": Edit(f"{_WRAPPER}.forward", "except BaseException:", "except Exception:"),
    "flat-in-forward-after-an-error": Edit("flat.unit:FlatUnit.abandon_forward", "    self.phase = Phase.IDLE\n", ""),
    "flat-in-backward-after-an-error": Edit("flat.unit:FlatUnit.check_idle", "    self.recover()\n", ""),
    "flat-any-unit-frees-all": Edit(
        "flat.unit:FlatUnit.abandon_forward",
        "if self.iteration.forward_root is self:\n        for group",
        "if True:\n        for group",
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})
