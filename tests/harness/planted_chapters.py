"""Adapters of a reference of which one place is edited: for requirements of older chapters, one bug each.

They are the requirements that no bug of the other files was planted for.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

GATHERS = "per_parameter.group:ParamGroup"
UNIT = "per_parameter.unit:Unit"
REDUCTION = "per_parameter.reduction"

PER_PARAMETER = {
    # AUTOGRAD, REGISTRATION, TRAINING.
    "unused-get-zeros": Edit(f"{REDUCTION}:take", "group.options.reduce_unused and ", ""),
    "named-tuples-become-tuples": Edit("common.containers:_rebuild_sequence", "type(old)._make(items)", "tuple(items)"),
    "one-hook-alone": Edit(f"{REDUCTION}:Accumulator.add", "for param in params:", "for param in params[:1]:"),
    "kept-after-a-dropped-forward": Edit(
        f"{UNIT}._end_of_backward",
        "if unit.group.phase is not Phase.POST_BACKWARD:",
        "if unit.group.phase is not Phase.POST_BACKWARD and len(unit.group.forward_indices) == 0:",
    ),
    "first-unit-gathers-all": Edit(
        f"{UNIT}._root_pre_forward",
        "group.drop_stale()",
        "group.drop_stale(); group.unshard(); group.wait_for_unshard()",
    ),
    "average-is-a-sum": Edit(
        f"{REDUCTION}:Reducer._reduce_scatter", "group, division.reduce_op", "group, torch.distributed.ReduceOp.SUM"
    ),
    "second-forward-not-gathered": Edit(
        f"{UNIT}._pre_backward",
        "entering = self.group.phase is not Phase.PRE_BACKWARD",
        "entering = self.group.phase is Phase.IDLE",
    ),
    "sum-of-different-batches": Edit(
        f"{REDUCTION}:Reducer._reduce_scatter", "group, division.reduce_op", "group, torch.distributed.ReduceOp.SUM"
    ),
    "gradients-of-two-models-add-up": Edit(
        f"{REDUCTION}:_take_one", "param.unsharded.grad = param.unsharded.grad, None", "_ = param.unsharded.grad, None"
    ),
    "backward-not-hooked": Edit(
        f"{UNIT}._complete_forward", "hooks.call_before_backward(self._pre_backward, output)", "pass"
    ),
    "second-call-not-gathered": Edit(
        f"{UNIT}._pre_backward",
        "entering = self.group.phase is not Phase.PRE_BACKWARD",
        "entering = self.group.phase is Phase.IDLE",
    ),
    "cast-not-noticed": Edit("per_parameter.shards:Shards.refresh", "param.adopt()", "pass"),
    "no-inputs-not-reduced": Edit(
        f"{UNIT}._end_of_backward", "if unit.group.phase is not Phase.POST_BACKWARD:", "if False:"
    ),
    # PRECISION, COLLECTIVES, ACCUMULATION, HYBRID.
    "dtype-of-the-first-step": Edit(
        f"{GATHERS}._make_unsharded",
        "layout = self.shards.gather_layout\n",
        "layout = self.shards.gather_layout\n"
        "    if not any(param.sharded.requires_grad for param in self.shards.params):\n"
        "        self.precision = type(self.precision)(param_dtype=self.precision.param_dtype)\n",
    ),
    "one-rank-reduces": Edit(f"{REDUCTION}:Reducer._reduce_scatter", "if group.mesh.size == 1:", "if False:"),
    "gathers-twice": Edit(
        f"{GATHERS}._gather",
        "return source, output, collectives",
        "collectives.gather(output, source, mesh.group, unit=self.label); return source, output, collectives",
    ),
    "gathers-what-is-gathered": Edit(
        f"{GATHERS}.unshard",
        "self._pending is not None or self.residence is Residence.UNSHARDED",
        "self._pending is not None",
    ),
    "neighbours-of-another-replica": Edit(
        "per_parameter.mesh:_smaller_mesh",
        "mesh.mesh.mesh.view(-1, size)",
        "mesh.mesh.mesh.flatten().view(size, -1).T.contiguous()",
    ),
    "replicas-are-made-alike": Edit(
        f"{GATHERS}._gather",
        "assert mesh.group is not None",
        "mesh.replicas is None or dist.broadcast(source.clone(), group_src=0, group=mesh.replicas)",
    ),
    "neighbours-of-another-host": Edit(
        "per_parameter.mesh:_smaller_mesh",
        "mesh.mesh.mesh.view(-1, size)",
        "mesh.mesh.mesh.flatten().sort().values.view(-1, size)",
    ),
    # COMPILED, TIED, COMPOSITION.
    "new-parameters-each-time": Edit(
        f"{GATHERS}._copy_out",
        "self._unsharded is None or self._unsharded_layout is not self.shards.gather_layout",
        "True",
    ),
    "inputs-saved-for-backward": Edit(
        "common.hooks:_CallOnBackward.forward",
        "ctx.callback = callback",
        "ctx.callback = callback\n    ctx.save_for_backward(*inputs)",
    ),
    # As for graphs that are replayed from fixed memory.
    "inputs-of-one-size": Edit(
        "common.hooks:call_after_backward",
        "cast(Any, _CallOnBackward).apply(callback, *tensors))",
        "[torch._dynamo.mark_static(one) or one for one in cast(Any, _CallOnBackward).apply(callback, *tensors)])",
    ),
    "tied-counted-twice": Edit(
        f"{REDUCTION}:Reducer._layout",
        "[p.size for p in params], [p.dim for p in params]",
        "[p.size for p in params for _ in p.owners], [p.dim for p in params for _ in p.owners]",
    ),
    "unsharded-are-plain": Edit(
        "per_parameter.param:_cut_tensor_parallel", "Cut(data, dim, spec, old)", "Cut(data, dim, spec, None)"
    ),
    "pending-sums-not-summed": Edit(f"{REDUCTION}:_local_grad", "if grad.placements != wanted:", "if False:"),
    "gradients-of-one-kind": Edit(
        f"{REDUCTION}:take",
        "if grad is not None:",
        "if grad is not None and param.is_tensor_parallel:",
    ),
}

FLAT = {
    "flat-one-rank-reduces": Edit(
        "flat.reduction:Reducer._reduce_scatter", "if group.ranks.shard_group is None:", "if False:"
    ),
    "flat-gathers-twice": Edit(
        "flat.group:FlatGroup._gather",
        "collectives.gather(output, source, self.ranks.shard_group, unit=self.label)",
        "[collectives.gather(output, source, self.ranks.shard_group, unit=self.label) for _ in range(2)]",
    ),
    "flat-steps-in-what-was-loaded": Edit("flat.optim_state:_shard_state", ".to(home, copy=True)", ".to(home)"),
    "flat-saving-gathers": Edit("flat.state_dict:finish", "unit.group.shards.adopt()", "unit.group.unshard()"),
    "flat-rows-misplaced": Edit("flat.state_dict:_rows", "if pieces > 1", "if pieces > 2"),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})
