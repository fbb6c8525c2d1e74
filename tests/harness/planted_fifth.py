"""Adapters of a flat reference of which one place is edited: what an independent reader wrote, and cases let live.

Strides of what is sent and loaded, options of which a root asks, calls about several wrappers or replicas,
interrupts, and gathers that come once too often or too early.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

FLAT = {
    # From one rank to others, and from files.
    "first-rank-scrambles-columns": Edit(
        "flat.construct:_broadcast",
        "if not is_dense(tensor):\n            tensor.copy_(flat.view(tensor.size()))",
        "if not tensor.is_contiguous():\n            tensor.copy_(flat.clone().view(tensor.size()))",
    ),
    "loaded-in-another-order": Edit(
        "flat.shards:FlatShards.cut_one", "if whole.stride() != piece.stride:", "if not whole.is_contiguous():"
    ),
    # Options, and calls.
    "bounds-that-differ": Edit(
        "flat.construct:_check_homogeneous",
        '        "limit_all_gathers": {unit.options.limits_gathers for unit in units},\n',
        "",
    ),
    "any-configuration-of-optimizers": Edit(
        "flat.options:settings_of",
        "type(optim_config) is not expected_optim",
        "not isinstance(optim_config, OptimStateDictConfig)",
    ),
    "paths-not-clean-at-their-end": Edit(
        "flat.registry:clean",
        'return ".".join(part for part in name.split(".") if part not in (WRAPPED, _CHECKPOINTED))',
        'return name.replace(f"{WRAPPED}.", "").replace(f"{_CHECKPOINTED}.", "")',
    ),
    "older-call-of-no-group": Edit(
        "flat.module:FullyShardedDataParallel.full_optim_state_dict", "None, form, group)", "None, form, None)"
    ),
    "first-root-alone": Edit(
        "flat.module:FullyShardedDataParallel.fsdp_modules",
        "if wrapper.check_is_root()]",
        "if wrapper.check_is_root()][:1]",
    ),
    "interrupts-not-abandoned": Edit(
        "flat.module:FullyShardedDataParallel.forward", "except BaseException:", "except Exception:"
    ),
    "root-casts-by-its-own-setting-alone": Edit(
        "flat.unit:FlatUnit._cast_inputs",
        "casts = wanted or precision.cast_forward_inputs",
        "casts = wanted if self.is_root else precision.cast_forward_inputs",
    ),
    # Gathers and reductions.
    "hybrid-frees-between-microbatches": Edit(
        "flat.unit:FlatUnit._frees_after_backward",
        "self.syncs or self.strategy.reshards_after_forward",
        "self.syncs or self.strategy.reshards_after_forward or self.strategy.is_hybrid",
    ),
    "not-in-the-last-microbatch": Edit(
        "flat.unit:FlatUnit._finish_backward", "        self._reduce()\n", "        pass\n"
    ),
    "recomputation-gathers-the-next": Edit(
        "flat.unit:FlatUnit.pre_forward",
        "if self.forward_prefetch and not hooks.in_backward():",
        "if self.forward_prefetch:",
    ),
    "gathered-before-always": Edit(
        "flat.unit:FlatUnit._pre_backward",
        "if self.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:",
        "if self.backward_prefetch is not None:",
    ),
    "frozen-while-gathered": Edit(
        "flat.group:FlatGroup.unshard",
        "        self._sync_requires_grad()  # it may have been kept after an evaluation\n",
        "",
    ),
    "groups-by-place": Edit(
        "flat.optim_state:load",
        "**_options_for(table.names([group]), group, saved_groups)",
        "**{key: value for key, value in saved_groups[len(own)].items() if key != 'params'}",
    ),
    "numbers-in-the-order-of-groups": Edit(
        "flat.optim_state:_rename", 'renamed.sort(key=lambda group: group["params"][:1])', "pass"
    ),
    "whole-divided-twice": Edit(
        "flat.reduction:Reducer._division", "self._group.ranks.size,", "self._group.ranks.group.size(),"
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceFlatAdapter: FLAT})
