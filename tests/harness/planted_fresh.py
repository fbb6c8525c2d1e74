"""Adapters of the flat reference of which one place is edited: what several options together let live.

Flat parameters that are frozen, recurrent or beside tensor parallelism, evaluations that gather ahead or in full
precision, wrappers within plain modules, and dtypes that differ between compute, reduction and shards.
"""

from __future__ import annotations

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
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceFlatAdapter: FLAT})
