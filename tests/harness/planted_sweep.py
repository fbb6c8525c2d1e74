"""Adapters of a reference of which one place is edited: what a sweep of one-place changes found to live.

Several parameters with hooks in one unit, whole state dicts beside tensor parallelism, rules that wrap, calls by older
names, and what units are given.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    "factor-by-an-earlier-name": Edit(
        "per_parameter.module:FSDPModule.set_reduce_scatter_divide_factor",
        "self.set_gradient_divide_factor(factor)",
        "pass",
    ),
    "memory-apart-for-the-last": Edit("per_parameter.shards:Shards._extended_input", "apart |= set(", "apart = set("),
    "dimensions-of-the-last": Edit(
        "per_parameter.shards:Shards._extended_input", "dims += [0] * len(inputs)", "dims = [0] * len(inputs)"
    ),
    "last-hook-not-called": Edit(
        "per_parameter.shards:Shards.finish_unsharded", "for param in self.params:", "for param in self.params[:-1]:"
    ),
    "lists-copied": Edit(
        "common.containers:_rebuild_sequence", "if all(new is item", "if isinstance(old, tuple) and all(new is item"
    ),
    "dicts-copied": Edit("common.containers:_rebuild_dict", "if not changed:", "if False:"),
    "objects-copied": Edit(
        "common.containers:map_tensors",
        "    return value\n",
        "    return copy.copy(value) if hasattr(value, '__dict__') else value\n",
    ),
    "inputs-without-gradients-copied": Edit(
        "common.hooks:call_after_backward",
        "tensor.requires_grad else tensor",
        "tensor.requires_grad else tensor.clone()",
    ),
    "inputs-in-place-unnoticed": Edit(
        "common.hooks:_CallOnBackward.forward", "return inputs", "return tuple(tensor.detach() for tensor in inputs)"
    ),
    "batch-without-rows-is-no-input": Edit(
        "common.hooks:call_after_backward", "if not tensors:", "if not sum(tensor.numel() for tensor in tensors):"
    ),
}

FLAT = {
    "flat-rule-for-all-does-not-wrap": Edit(
        "wrap:always_wrap_policy", "return True", "return kwargs.get('recurse', False)"
    ),
    "flat-wrapped-by-hand-is-lost": Edit("wrap:wrap", "        return module\n", "        return None\n"),
    "flat-rule-without-a-text": Edit(
        "wrap:ModuleWrapPolicy.__repr__", 'f"ModuleWrapPolicy({set(self._classes)})"', "self._classes"
    ),
    "flat-plain-parts-are-cut": Edit(
        "flat.reduction:_parts",
        "if spec is not None:",
        "if (spec := spec or next(filter(None, shards.specs))) is not None:",
    ),
    "flat-own-columns-saved": Edit("flat.state_dict:whole_copy", "value.full_tensor()", "value.to_local().clone()"),
    "flat-states-of-own-columns-saved": Edit(
        "flat.optim_state:_whole_states",
        "else whole_copy(value)",
        "else getattr(value, '_local_tensor', value).detach().clone()",
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceFlatAdapter: FLAT, ReferenceAdapter: PER_PARAMETER})
