"""Adapters of the flat reference of which one place is edited: whose gradients, states and names are whose.

Parameters that a script replaces, freezes between microbatches or lays column by column, frozen units that run twice or
have keywords, gradients that are not reduced while parameters are looked at or cast, roots without parameters, and
models on a part of the ranks.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

FLAT = {
    # Parameters that a script replaces, or freezes between microbatches.
    "flat-gradients-of-the-replaced": Edit(
        "flat.reduction:Gradients.add",
        "self._last.current([holder.param for holder in holders])",
        "self._last.current(self._last.params)",
    ),
    "flat-others-in-the-same-memory-not-taken": Edit(
        "flat.shards:FlatShards.adopt",
        "        self.originals[index] = held\n        if is_view_of(held, self.flat, span):\n            continue\n",
        "        if is_view_of(held, self.flat, span):\n            continue\n        self.originals[index] = held\n",
    ),
    "flat-others-in-the-same-memory-not-noticed": Edit(
        "flat.shards:FlatShards.has_changed",
        "(param is not original or not is_view_of(param, self.flat, span))",
        "not is_view_of(param, self.flat, span)",
    ),
    # Frozen units.
    "flat-frozen-gathered-once": Edit(
        "flat.unit:FlatUnit._pre_backward", "self.phase is not Phase.PRE_BACKWARD", "self.phase is Phase.IDLE"
    ),
    "flat-frozen-freed-by-position": Edit(
        "flat.unit:FlatUnit.pre_forward",
        "args, kwargs = hooks.call_after_backward(self._reshard_after_backward, (args, kwargs))",
        "args = hooks.call_after_backward(self._reshard_after_backward, args)",
    ),
    # Gradients that are not reduced, and what a script looks at, casts or spoils.
    "flat-unreduced-cast-as-shards": Edit("flat.summon:_expose", "    unit.gradients.hide_unsharded()\n", ""),
    "flat-unreduced-hidden-by-a-look": Edit(
        "flat.summon:_reduced_shown", "        gradients.show_unsharded()\n", "        pass\n"
    ),
    "flat-unreduced-hidden-by-an-error": Edit(
        "flat.summon:_reduced_shown",
        "    try:\n        yield\n    finally:\n",
        "    yield\n    if True:\n",
    ),
    "flat-whole-after-a-refusal": Edit(
        "flat.summon:_unit_full",
        "                if writeback:\n                    group.outdate()\n                    _write_back(group)\n"
        "            finally:\n",
        "                if writeback:\n                    group.outdate()\n                    _write_back(group)\n"
        "            except ZeroDivisionError:\n                raise\n            else:\n",
    ),
    "flat-functions-refused-after-an-error": Edit(
        "flat.module:FullyShardedDataParallel.apply", "    self._unit.recover()\n", ""
    ),
    # States, by their places.
    "flat-states-by-rows": Edit(
        "flat.optim_state:_part_of_state", "shards.elements(index, value)", "value.reshape(-1)"
    ),
    "flat-states-loaded-by-rows": Edit(
        "flat.optim_state:_state_to_load",
        "shards.like_part(index, value.tensor)",
        "value.tensor.view(shards.originals[index].size())",
    ),
    "flat-states-of-the-first-of-all": Edit(
        "flat.optim_state:save", "form.rank0_only and process_group.rank() != 0", "form.rank0_only and dist.get_rank()"
    ),
    "flat-states-sent-by-the-first-of-all": Edit(
        "flat.optim_state:_from_first_rank", "if process_group.rank() == 0:", "if dist.get_rank() == 0:"
    ),
    # Wrappers, their options and names.
    "flat-bare-root-saves-everywhere": Edit(
        "flat.state_dict:finish", "if isinstance(config,", "if unit.group is not None and isinstance(config,"
    ),
    "flat-bare-root-casts-nothing": Edit(
        "flat.unit:FlatUnit._cast_inputs",
        "if precision.param_dtype",
        "if self.group is not None and precision.param_dtype",
    ),
    "flat-norm-with-options-of-the-model": Edit(
        "flat.wrapping:_leave_out_of_mixed_precision", "**targets.get(child, arguments)", "**arguments"
    ),
    "flat-cast-moves-names": Edit(
        "flat.summon:_expose", "owner.module._parameters[owner.name] = None", "owner.module._parameters.pop(owner.name)"
    ),
    "flat-buffers-by-checkpointing-names": Edit(
        "flat.construct:build", "{clean(name): buffer.dtype for", "{name: buffer.dtype for"
    ),
    "flat-bare-root-is-not-summoned": Edit(
        "flat.summon:full_params",
        "units = units_in(module)",
        "units = [unit for unit in units_in(module) if unit.group is not None]",
    ),
    "flat-states-of-those-that-have-some": Edit(
        "flat.optim_state:save",
        "        found |= _whole_states(saved, per_unit.get(id(saved), {}), shards=form.shards)\n",
        "        if id(saved) in per_unit:\n"
        "            found |= _whole_states(saved, per_unit[id(saved)], shards=form.shards)\n",
    ),
    "flat-function-gets-what-was-computed": Edit(
        "flat.reduction:Reducer.reduce",
        "grad.to(self.reduce_dtype or grad.dtype)",
        "grad if self.comm_hook else grad.to(self.reduce_dtype or grad.dtype)",
    ),
    "flat-refused-once": Edit(
        "flat.construct:_check_homogeneous",
        "        raise ValueError(",
        "        for unit in units:\n                unit.is_root = unit is units[0]\n            raise ValueError(",
    ),
    "flat-elements-left-twice": Edit(
        "flat.wrapping:_run_callable", "            return params\n", "            return params - taken\n"
    ),
    "flat-elements-of-the-first-place-alone": Edit(
        "flat.wrapping:_run_callable",
        "                taken |= known[child]\n",
        "                    taken |= known[child]\n",
    ),
    "flat-unreduced-of-the-freed-kept": Edit(
        "flat.unit:FlatUnit._recover",
        "if unit.group is not None:",
        "if unit.group is not None and unit.group.is_unsharded:",
    ),
    "flat-views-without-gradients": Edit(
        "flat.group:FlatGroup._make_views",
        "with torch.enable_grad():",
        "with torch.set_grad_enabled(torch.is_grad_enabled()):",
    ),
    "flat-replicas-kept-while-waiting": Edit(
        "flat.unit:FlatUnit._frees_after_backward",
        "self.strategy.reshards_after_forward",
        "self.strategy is ShardingStrategy.FULL_SHARD",
    ),
    "flat-options-of-the-optimizer": Edit(
        "flat.optim_state:save", "for key, value in options.items() if", "for key, value in group.items() if"
    ),
    "flat-local-states-with-originals": Edit(
        "flat.state_dict:_put_local", "        found.pop(prefix + name, None)\n", "        pass\n"
    ),
    "flat-whole-cut-ones-thawed": Edit(
        "flat.summon:_register_whole",
        "shards.originals[index].requires_grad if shards.use_orig else shards.flat.requires_grad",
        "shards.flat.requires_grad",
    ),
    "flat-second-place-stays-whole": Edit(
        "flat.summon:_register_shards",
        "        for owner in owners:\n            owner.module._parameters.pop(owner.name, None)\n",
        "        owners[0].module._parameters.pop(owners[0].name, None)\n",
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceFlatAdapter: FLAT})
