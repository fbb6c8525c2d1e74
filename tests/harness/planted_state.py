"""Adapters of a reference of which one place is edited: state dicts, and whole parameters by request."""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    "gathered-is-saved": Edit("per_parameter.unit:Unit._before_state_dict", "self.group.to_sharded()", "pass"),
    "no-hook-before-loading": Edit(
        "per_parameter.unit:Unit.register", "holder.register_load_state_dict_pre_hook(self._before_state_dict)", "pass"
    ),
    "no-hook-before-saving": Edit(
        "per_parameter.unit:Unit.register", "holder.register_state_dict_pre_hook(self._before_state_dict)", "pass"
    ),
    "assigned-not-taken": Edit("per_parameter.param:ShardedParam.adopt", "if not is_same:", "if False:"),
    "first-owner-alone": Edit(
        "per_parameter.param:ShardedParam.register", "for owner in self.owners:", "for owner in self.owners[:1]:"
    ),
    "stale-is-kept": Edit(
        "per_parameter.group:ParamGroup.drop_stale", "self.shards.version() != self._gathered_version", "False"
    ),
    "version-not-noted": Edit(
        "per_parameter.group:ParamGroup.unshard", "self._gathered_version = self.shards.version()", "pass"
    ),
    "unshard-forgets": Edit(
        "per_parameter.group:ParamGroup.unshard",
        "if self._pending is not None or self.residence is Residence.UNSHARDED:",
        "if self._pending is not None:",
    ),
    "always-stale": Edit(
        "per_parameter.group:ParamGroup.drop_stale",
        "is_kept and self.shards.version() != self._gathered_version",
        "is_kept",
    ),
}

FLAT = {
    # Saving.
    "flat-names-of-wrappers": Edit("flat.state_dict:finish", '_rename(found, f"{prefix}{WRAPPED}.", prefix)', "pass"),
    "flat-all-ranks": Edit("flat.state_dict:finish", "config.rank0_only and", "False and"),
    "flat-wrong-first-rank": Edit(
        "flat.state_dict:finish", "unit.ranks.group.rank() != 0", "unit.ranks.group.rank() == 0"
    ),
    "flat-buffers-on-all-ranks": Edit(
        "flat.state_dict:finish",
        "for key in [key for key in found if key.startswith(prefix)]:\n            del found[key]",
        "for key in [prefix + key.name for key in keys_of(unit)]:\n            found.pop(key, None)",
    ),
    "flat-shards-are-whole": Edit(
        "flat.state_dict:_put_named", "sharded_copy(group, index, values[index])", "whole_copy(values[index])"
    ),
    "flat-flat-parameter-too": Edit("flat.state_dict:_put_named", "found.pop(prefix + FLAT_PARAM, None)", "pass"),
    "flat-first-name-alone": Edit(
        "flat.state_dict:_put_named",
        "for name, index in keys_of(unit):",
        "for index, name in {k.param: k.name for k in reversed(keys_of(unit))}.items():",
    ),
    "flat-last-owner-alone": Edit("flat.state_dict:keys_of", "for owner in owners", "for owner in owners[:1]"),
    "flat-rows-of-the-next-rank": Edit(
        "flat.state_dict:sharded_copy", "ranks.size, ranks.rank)", "ranks.size, (ranks.rank + 1) % ranks.size)"
    ),
    "flat-shards-keep-all-alive": Edit(
        "flat.state_dict:sharded_copy", ".clone(memory_format=torch.contiguous_format)", ""
    ),
    "flat-placed-as-replicas": Edit("flat.state_dict:sharded_copy", "if ranks.size > 1:", "if False:"),
    "flat-settings-of-the-root-alone": Edit(
        "flat.state_dict:set_settings", "for unit in units_in(module):", "for unit in list(units_in(module))[:1]:"
    ),
    # Loading.
    "flat-missing-not-reported": Edit("flat.state_dict:_take_named", "missing.append(prefix + name)", "pass"),
    "flat-first-missing-ends": Edit(
        "flat.state_dict:_take_named",
        "missing.append(prefix + name)\n            continue",
        "missing.append(prefix + name)\n            return",
    ),
    "flat-loaded-at-offset-zero": Edit(
        "flat.shards:FlatShards.put",
        "shard[span.offset : span.offset + span.numel].copy_(self.cut_one(index, whole))",
        "shard[: span.numel].copy_(self.cut_one(index, whole))",
    ),
    "flat-first-piece-not-loaded": Edit(
        "flat.state_dict:_take_named",
        "write_part(group, index, local_part(group, index, dtensor.whole(value)))",
        "index and write_part(group, index, local_part(group, index, dtensor.whole(value)))",
    ),
    "flat-steps-not-counted": Edit("common.hooks:optimizer_steps", "return _optimizer_steps[0]", "return 0"),
    # State of optimizers.
    "flat-optimizer-everywhere": Edit(
        "flat.optim_state:save", "form.rank0_only and process_group.rank() != 0", "False"
    ),
    "flat-optimizer-groups-dropped": Edit(
        "flat.optim_state:save",
        'return {"state": found, "param_groups": named}',
        'return {"state": found, "param_groups": named[:1]}',
    ),
    "flat-optimizer-groups-by-first-name": Edit(
        "flat.optim_state:Table.names", "for name in self.place(param).names", "for name in self.place(param).names[:1]"
    ),
    "flat-optimizer-whole-in-shards": Edit("flat.optim_state:_whole_states", "if shards else", "if False else"),
    "flat-optimizer-own-rank-alone": Edit("flat.optim_state:_merge", "if process_group is not None:", "if False:"),
    "flat-optimizer-wrong-offset": Edit(
        "flat.optim_state:_whole_states",
        "shard[spans[index].offset : spans[index].offset + spans[index].numel].copy_(state[key])",
        "shard[: spans[index].numel].copy_(state[key])",
    ),
    "flat-optimizer-scalars-dropped": Edit(
        "flat.optim_state:_whole_states",
        "found[saved.names[index]][key] = copy_of(kind)",
        "pass",
    ),
    "flat-optimizer-keeps-its-groups": Edit(
        "flat.optim_state:_options_for", 'if set(names) & set(group["params"]):', "if False:"
    ),
    "flat-optimizer-first-group": Edit(
        "flat.optim_state:_options_for", 'if set(names) & set(group["params"]):', "if True:"
    ),
    "flat-optimizer-state-of-the-first-rank": Edit(
        "flat.optim_state:_shard_state",
        "saved.group.shards.cut_one(index, local).to(home, copy=True)",
        "local.flatten()[: saved.group.shards.spans[index].numel].to(home, copy=True)",
    ),
    "flat-optimizer-not-sent": Edit("flat.optim_state:load", "if rank0_only:", "if False:"),
    "flat-optimizer-shape-of-flat": Edit(
        "flat.optim_state:_state_to_load",
        "shards.like_part(index, value.tensor) if isinstance(value, _Part) else value",
        "value.tensor if isinstance(value, _Part) else torch.zeros_like(value)",
    ),
    "flat-optimizer-joined-at-zero": Edit(
        "flat.optim_state:_joined",
        "found[key][span.offset : span.offset + span.numel].copy_(part.tensor)",
        "found[key][: span.numel].copy_(part.tensor)",
    ),
    "flat-optimizer-joined-drops-the-last": Edit(
        "flat.optim_state:_joined", "if part is not None:", "if part is not None and span is not shards.spans[-1]:"
    ),
    "flat-optimizer-zero-steps": Edit("flat.optim_state:_one_for_all", "return values[0]", "return values[0] * 0"),
    "flat-optimizer-part-of-state": Edit(
        "flat.optim_state:_part_of_state",
        "key: value[span.offset : span.offset + span.numel] if",
        "key: value[: span.numel] if",
    ),
    # Whole parameters.
    "flat-whole-stale-on-one-rank": Edit("flat.summon:_unit_full", "group.keep_up_to_date()", "pass"),
    "flat-whole-writes-lost": Edit("flat.summon:_unit_full", "if writeback:\n", "if False:\n"),
    "flat-whole-writes-always": Edit("flat.summon:_unit_full", "if writeback:\n", "if True:\n"),
    "flat-whole-on-all-ranks": Edit("flat.summon:_unit_full", "rank0_only and group.ranks.group.rank() != 0", "False"),
    "flat-whole-of-the-root-alone": Edit("flat.summon:full_params", "if recurse:", "if False:"),
    "flat-whole-shards-not-registered": Edit("flat.summon:_unit_full", "                _register_shards(group)\n", ""),
    "flat-whole-still-summoned": Edit("flat.summon:_unit_full", "        unit.is_summoned = False\n", "        pass\n"),
    "flat-whole-in-place-skipped": Edit(
        "flat.summon:_write_back", "if not _lies_in_place(shards, index, value):", "if index:"
    ),
    "flat-whole-gradients-lost": Edit(
        "flat.summon:WholeGradients.take_back", "if writeback and grad is not None", "if False and grad is not None"
    ),
    "flat-whole-gradients-always": Edit(
        "flat.summon:WholeGradients.take_back", "if writeback and grad is not None", "if grad is not None"
    ),
    "flat-whole-gradients-of-this-rank": Edit(
        "flat.summon:WholeGradients.__init__", "if group.ranks.shard_group is not None:", "if False:"
    ),
    "flat-whole-gradients-not-restored": Edit(
        "flat.summon:WholeGradients.take_back", "self._restore(index, grad)", "pass"
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})
