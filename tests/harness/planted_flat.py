"""Adapters of the flat half with one place edited: nothing sharded, ignored modules, meta device, state dicts."""

from __future__ import annotations

from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

FLAT = {
    # Nothing is sharded.
    "replicas-not-averaged": Edit(
        "flat.ranks:Ranks.replicated",
        "replace(self, size=1, rank=0, across=self.group)",
        "replace(self, size=1, rank=0)",
    ),
    "replicas-are-shards": Edit(
        "flat.construct:_settle",
        "        return strategy, found.replicated()\n    return",
        "        return strategy, found\n    return",
    ),
    "replicas-reduced-after-the-hook": Edit(
        "flat.reduction:Reducer._finish",
        "group.ranks.replicas if self.comm_hook is None else None",
        "group.ranks.replicas",
    ),
    "whole-values-are-views": Edit("flat.state_dict:whole_copy", "value.detach().clone()", "value.detach()"),
    "no-buffer-for-another-dtype": Edit(
        "flat.group:FlatGroup._prepare_buffer",
        "self.ranks.size == 1 and flat.dtype == self.dtype and flat.device",
        "self.ranks.size == 1 and flat.device",
    ),
    # Units that a policy finds.
    "found-units-not-kept": Edit(
        "flat.construct:_inherited", '"ignored_modules": None,', '"ignored_modules": None, "sharding_strategy": None,'
    ),
    "found-units-not-sent": Edit(
        "flat.construct:_inherited", '"ignored_modules": None,', '"ignored_modules": None, "sync_module_states": False,'
    ),
    "found-units-reset": Edit(
        "flat.construct:_inherited", '"ignored_modules": None,', '"ignored_modules": None, "param_init_fn": None,'
    ),
    "gaps-not-filled": Edit("flat.construct:_broadcast", "tensor.copy_(flat.view(tensor.size()))", "pass"),
    "options-of-all-parameters-alone": Edit(
        "flat.optim_state:_options_for",
        'if set(names) & set(group["params"]):',
        'if set(names) == set(group["params"]):',
    ),
    # What is gathered already.
    "new-data-not-seen": Edit("flat.group:FlatGroup.is_stale", " or self.shards.has_changed()", ""),
    "new-flat-data-not-seen": Edit("flat.group:FlatGroup.is_stale", "return moved or ", "return "),
    "new-data-dropped": Edit("flat.unit:FlatUnit._root_pre_forward", "group.shards.adopt()", "pass"),
    "new-data-seen-by-holders": Edit(
        "flat.shards:FlatShards.has_changed", "param is not None and (", "param is not None and span.numel and ("
    ),
    "new-data-forgotten-by-reading": Edit(
        "flat.summon:_unit_full", "if was_stale := group.is_stale():", "if (was_stale := group.is_stale()) and False:"
    ),
    "unreduced-dropped-by-an-evaluation": Edit(
        "flat.unit:FlatUnit._root_post_forward", "self.iteration.forget_latest_forwards()", "self._recover()"
    ),
    "unreduced-dropped-by-a-cast": Edit(
        "flat.group:FlatGroup._prepare_buffer", "leaf.grad = old.leaf.grad.to(leaf.dtype)", "pass"
    ),
    "memory-of-before-the-cast": Edit(
        "flat.group:FlatGroup._prepare_buffer",
        "isinstance(old, Alias) and old.leaf.data_ptr() == flat.data_ptr() and old.leaf.dtype == flat.dtype",
        "isinstance(old, Alias)",
    ),
    # Dtypes.
    "whole-values-of-compute": Edit(
        "flat.group:FlatGroup.gather_full", "dtype=shard.dtype, device", "dtype=self.dtype, device"
    ),
    "reduces-low-in-evaluation": Edit(
        "flat.unit:FlatUnit.choose_precision", "self.reducer.reduce_dtype = None if full else ", "_ = "
    ),
    "norm-of-the-first-dtype": Edit(
        "flat.reduction:clip_grad_norm",
        "total.to(reduce(torch.promote_types, [grad.dtype for grad in grads]))",
        "total.to(grads[0].dtype)",
    ),
    # Ignored modules, and the meta device.
    "ignored-are-made": Edit(
        "flat.construct:_parents_first",
        " and child not in seen and child not in ignored.modules:",
        " and child not in seen:",
    ),
    "ignored-are-cast": Edit("flat.unit:cast_buffers", "if buffer not in ignored:", "if True:"),
    "buffers-alone-stay": Edit(
        "flat.construct:materialize",
        "[*child.parameters(recurse=False), *child.buffers(recurse=False)]",
        "list(child.parameters(recurse=False))",
    ),
    "ignored-not-scaled": Edit("flat.reduction:clip_grad_norm", "            grads.append(grad)\n", ""),
    # State dicts, and functions for every module.
    "applied-is-lost": Edit(
        "flat.summon:full_params", "_unit_full(unit, writeback, ", "_unit_full(unit, writeback and recurse, "
    ),
    "loads-as-it-lies": Edit("flat.shards:FlatShards.cut_one", "if whole.stride() != piece.stride:", "if False:"),
    "cast-loses-gradients": Edit("flat.summon:_conceal", "if grad is not None:", "if False:"),
    "cast-loses-new-data": Edit("flat.summon:_expose", "    shards.adopt()\n", ""),
    "whole-have-names-of-wrappers": Edit(
        "flat.module:FullyShardedDataParallel._shown_name", "if self._unit.is_summoned", "if False"
    ),
    "mesh-of-the-replicas": Edit(
        "flat.state_dict:sharded_copy", "from_group(ranks.group,", "from_group(ranks.across or ranks.group,"
    ),
    "ignored-states-not-saved": Edit(
        "flat.optim_state:save",
        "            if state is not None:\n                found",
        "            if False:\n                found",
    ),
    "ignored-states-not-loaded": Edit(
        "flat.optim_state:_state_to_load", "return None if state is None else", "return None if True else"
    ),
    "first-name-of-a-module": Edit("flat.state_dict:keys_of", "remove_duplicate=False", "remove_duplicate=True"),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceFlatAdapter: FLAT})
