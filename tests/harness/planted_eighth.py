"""Adapters of the flat reference of which one place is edited: what cases let live of 140 that two readers wrote."""

from __future__ import annotations

from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

FLAT = {
    "flat-own-buffers-alone-restored": Edit(
        "flat.construct:build", "module.named_buffers()}", "module.named_buffers(recurse=False)}"
    ),
    "flat-renamed-twice-in-loads": Edit("flat.construct:_shard", "without_checkpointing(module),", "module,"),
    "flat-ignored-counts-as-meta": Edit("flat.construct:_is_on_meta", " if child not in ignored.modules]", "]"),
    "flat-norm-always-wide": Edit(
        "flat.reduction:clip_grad_norm",
        "return total.to(reduce(torch.promote_types, [grad.dtype for grad in grads]))",
        "return total",
    ),
    "flat-gradients-not-cast": Edit(
        "flat.summon:_conceal", "grad.dtype if param.dtype == dtype else param.dtype", "grad.dtype"
    ),
    "flat-drops-plain-modules": Edit(
        "flat.state_dict:finish",
        "        for key in [key for key in found if key.startswith(prefix)]:\n            del found[key]\n",
        "        found.clear()\n",
    ),
    "flat-keys-of-wrappers": Edit("flat.state_dict:clean_keys", "map(clean, keys)", "keys"),
    "flat-states-by-numbers-always": Edit(
        "flat.module:FullyShardedDataParallel.optim_state_dict_to_load", "by_name=is_named_optimizer", "by_name=False"
    ),
    "flat-replicas-may-change": Edit(
        "flat.unit:FlatUnit._check_kept",
        "not self.strategy.reshards_after_forward",
        'self.strategy.name == "SHARD_GRAD_OP"',
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceFlatAdapter: FLAT})
