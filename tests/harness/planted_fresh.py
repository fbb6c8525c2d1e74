"""Adapters of a reference of which one place is edited: what several options together, or equal hash seeds, let live.

Flat parameters that are frozen, recurrent or beside tensor parallelism, evaluations that gather ahead or in full
precision, wrappers within plain modules, dtypes that differ between compute, reduction and shards, and names that are
walked in the order of a set.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

FLAT = {
    # Where a unit is one flat parameter.
    "flat-shared-taken-twice": Edit(
        "flat.shards:FlatShards.take_over", "                mark_managed(replaced)\n", "                pass\n"
    ),
    "flat-frozen-goes-on": Edit(
        "flat.group:FlatGroup._sync_requires_grad",
        "if self._buffer.leaf.requires_grad",
        "if self.shards.use_orig and self._buffer.leaf.requires_grad",
    ),
    "flat-unreduced-whole-not-shown": Edit(
        "flat.reduction:Gradients._wholes", "return [(shards.flat, grad)]", "return []"
    ),
    "flat-recurrent-stale": Edit(
        "flat.shards:set_tensor",
        "if type(owner.module).__setattr__ is not",
        "if as_param and type(owner.module).__setattr__ is not",
    ),
    "flat-norm-of-other-elements": Edit(
        "flat.reduction:_parts", "grad[span.offset : span.offset + span.numel]", "grad[span.start :][: span.numel]"
    ),
    # Where nothing is sharded.
    "flat-cast-before-the-change": Edit(
        "flat.group:FlatGroup.is_stale",
        "if self._gathered_from is None:",
        "if self._gathered_from is None or not self.shards.is_sharded:",
    ),
    "flat-order-of-replicas-not-compared": Edit(
        "flat.unit:FlatUnit.pre_forward", "self.group.ranks.group)", "self.group.ranks.shard_group)"
    ),
    "flat-new-data-of-replicas-not-used": Edit(
        "flat.group:FlatGroup._prepare_buffer", "old.leaf.data_ptr() == flat.data_ptr() and ", ""
    ),
    # Evaluations.
    "flat-nothing-ahead-in-evaluation-mode": Edit(
        "flat.unit:FlatUnit.post_forward",
        "if torch.is_grad_enabled():",
        "if self.wrapper.training:",
    ),
    "flat-buffers-of-a-part-stay": Edit("flat.unit:FlatUnit._root_pre_forward", "if any(changes):", "if all(changes):"),
    "flat-unreduced-of-flat-lost": Edit(
        "flat.group:FlatGroup._prepare_buffer",
        "if old is not None and old.leaf.grad is not None:",
        "if old is not None and old.leaf.grad is not None and self.shards.use_orig:",
    ),
    "flat-buffers-stay-low": Edit(
        "flat.unit:_cast_buffer", "dtype = (unit.options.full_in_evaluation or {}).get(owner)", "dtype = None"
    ),
    "flat-buffers-of-the-last-module": Edit("flat.construct:_dtypes_in_evaluation", "found |= {", "found = {"),
    "flat-mode-of-the-wrapper": Edit(
        "flat.unit:FlatUnit.choose_precision",
        "self.group.shards.module if self.group is not None else self.wrapper",
        "self.wrapper",
    ),
    "flat-evaluations-gather-nothing-ahead": Edit(
        "flat.unit:FlatUnit.pre_forward",
        "if self.forward_prefetch and not",
        "if self.forward_prefetch and torch.is_grad_enabled() and not",
    ),
    "flat-evaluations-not-recorded": Edit(
        "flat.unit:FlatUnit.pre_forward",
        "self.iteration.record_first(self.group)",
        "torch.is_grad_enabled() and self.iteration.record_first(self.group)",
    ),
    # Steps.
    "flat-first-steps-in-backward": Edit(
        "flat.reduction:Reducer._accumulate", "for param in params:", "for param in params[:1]:"
    ),
    "flat-reduced-late-after-a-cast": Edit(
        "flat.group:FlatGroup._prepare_buffer",
        "if (on_gradient := self._on_gradient()) is not None:",
        "if old is None and (on_gradient := self._on_gradient()) is not None:",
    ),
    "flat-order-of-forwards-kept": Edit("flat.unit:FlatUnit._end_of_backward", "    self._forget_order()\n", ""),
    "flat-low-gradients-widened-by-a-move": Edit(
        "flat.summon:_conceal", "grad.dtype if param.dtype == dtype else param.dtype", "param.dtype"
    ),
    "flat-divided-by-the-dtype-of-compute": Edit(
        "flat.reduction:Reducer._reduce_scatter",
        "self._division(contributions.dtype)",
        "self._division(group.dtype)",
    ),
    "flat-divided-by-the-dtype-of-shards": Edit(
        "flat.reduction:Reducer._finish", "self._division(shard.dtype)", "self._division(group.shards.flat.dtype)"
    ),
    # How wrappers come to be, and what they save.
    "flat-children-wiped": Edit("flat.construct:_reset", "recurse=False", "recurse=True"),
    "flat-absent-buffers-cast": Edit(
        "flat.unit:cast_buffers", "if buffer is not None and buffer not in seen:", "if buffer not in seen:"
    ),
    "flat-buffers-in-the-dtype-of-before": Edit(
        "flat.state_dict:finish", "casts_buffers = unit.precision.buffer_dtype is not None", "casts_buffers = True"
    ),
    "flat-first-wrapper-takes-the-form": Edit(
        "flat.state_dict:set_settings", "for unit in units_in(module):", "for unit in units_in(module)[:1]:"
    ),
    "flat-first-of-all-ranks-saves": Edit(
        "flat.state_dict:finish", "unit.ranks.group.rank() != 0", "torch.distributed.get_rank() != 0"
    ),
    "flat-cut-values-not-written": Edit(
        "flat.summon:_write_back",
        "dtensor.local_part(getattr(owners[0].module, owners[0].name).detach())",
        "getattr(owners[0].module, owners[0].name).detach()",
    ),
    "flat-aligned-for-floats": Edit("flat.layout:alignment_of", "dtype.itemsize", "4"),
    # What is walked in the order of a set of names, which ranks with hash seeds of their own do not share.
    "flat-states-of-a-set": Edit("flat.optim_state:_whole_states", "dict.fromkeys((key, kind)", "set((key, kind)"),
    "flat-states-loaded-by-a-set": Edit(
        "flat.optim_state:_shard_state",
        "for key, value in state.items():\n",
        "for key in set(state):\n        value = state[key]\n",
    ),
    "flat-names-loaded-by-a-set": Edit(
        "flat.optim_state:load",
        "for index, name in enumerate(saved.names):\n",
        "for name in set(saved.names):\n            index = saved.names.index(name)\n",
    ),
    "flat-values-saved-by-a-set": Edit("flat.state_dict:_put_named", "in keys_of(unit):", "in set(keys_of(unit)):"),
    "flat-values-loaded-by-a-set": Edit("flat.state_dict:_take_named", "in keys_of(unit):", "in set(keys_of(unit)):"),
    "flat-first-values-by-a-set": Edit(
        "flat.construct:_prepare",
        "        sync_states([*dict.fromkeys(buffers), *params()], found, device)\n",
        "        names, own = {param: name for name, param in module.named_parameters()}, params()\n"
        "        named = {names[param]: param for param in own}\n"
        "        sync_states([*dict.fromkeys(buffers), *(named[name] for name in set(named))], found, device)\n",
    ),
    "flat-units-by-a-set": Edit(
        "flat.unit:FlatUnit._end_of_backward",
        "for unit in self.iteration.units:",
        "named = {unit.group.label: unit for unit in self.iteration.units if unit.group}\n"
        "    for unit in map(named.get, set(named)):",
    ),
}

PER_PARAMETER = {
    "laid-out-by-a-set-of-names": Edit(
        "per_parameter.construct:managed_params",
        "return found",
        "named = {f'{number} {name}': param for number, (param, name) in enumerate(found.items())}\n"
        "    return {named[key]: found[named[key]] for key in set(named)}",
    ),
    "laid-out-by-a-set-of-dtypes": Edit(
        "per_parameter.layout:build_layout",
        "order = sorted(range(len(sizes)), key=lambda index: -dtypes[index].itemsize)",
        "kinds = sorted(set(map(str, dtypes)), key=lambda kind: -getattr(torch, kind[6:]).itemsize)\n"
        "    order = [index for kind in kinds for index in range(len(sizes)) if str(dtypes[index]) == kind]",
    ),
    "units-by-a-set": Edit(
        "per_parameter.lazy_init:_units_below",
        "return list(units)",
        "named = {name: unit for name, module in root.modules[0].named_modules() if (unit := unit_of(module))}\n"
        "    return [named[name] for name in set(named)]",
    ),
    "norm-by-a-set-of-groups": Edit(
        "common.clip:combine_over_ranks",
        "group = max(pending, key=len)[-1]",
        "named = {group.group_name: group for groups in pending for group in groups}\n"
        "        group = named[[*set(named)][0]]",
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceFlatAdapter: FLAT, ReferenceAdapter: PER_PARAMETER})
