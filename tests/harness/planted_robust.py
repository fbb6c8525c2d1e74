"""Adapters of a reference of which one place is edited: recovery, settings, gathers ahead, hooks and lifetimes."""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

_RESET = "per_parameter.unit:Unit.reset"
_MODULE = "per_parameter.module:FSDPModule"
_ABANDON = "flat.unit:FlatUnit.abandon_forward"
_RECOVER = "flat.unit:FlatUnit._recover"

PER_PARAMETER = {
    # Recovery.
    "stays-in-its-phase": Edit(_RESET, "unit.phase = Phase.IDLE", "pass"),
    "gathers-in-flight-kept": Edit(_RESET, "unit.group.drop_pending()", "pass"),
    "not-freed-by-the-reset": Edit(_RESET, "unit.group.to_sharded()", "pass"),
    "unreduced-gradients-kept": Edit(_RESET, "reduction.drop(unit.group)", "pass"),
    "gradients-in-the-reduce-dtype-kept": Edit("per_parameter.reduction:drop", "param.accumulated = None", "pass"),
    "partial-shards-kept": Edit(_RESET, "unit.reducer.reset()", "pass"),
    "all-reduce-not-resumed": Edit(
        f"{_MODULE}.set_requires_gradient_sync", "group.options.all_reduce_grads = requires_gradient_sync", "pass"
    ),
    "order-kept": Edit(_RESET, "forget_forwards(self.iteration)", "pass"),
    "end-of-backward-queued-for-ever": Edit(_RESET, "self.iteration.callback_queued = False", "pass"),
    "reset-of-the-root-alone": Edit(_RESET, "self.iteration.units or [self]", "[self]"),
    # What a script sets.
    "function-before-the-all-reduce": Edit(
        "per_parameter.reduction:Reducer._finish",
        "    with streams.use(stream):\n",
        "    if group.options.all_reduce_hook is not None and group.mesh.replicas is not None:\n"
        "        group.options.all_reduce_hook(total.shards)\n"
        "    with streams.use(stream):\n",
    ),
    "function-for-all-units": Edit(f"{_MODULE}.set_all_reduce_hook", "recurse=False", "recurse=True"),
    "gather-for-all-units": Edit(f"{_MODULE}.set_custom_all_gather", "recurse=False", "recurse=True"),
    "reduction-for-all-units": Edit(f"{_MODULE}.set_custom_reduce_scatter", "recurse=False", "recurse=True"),
    "gather-in-other-memory": Edit(
        "per_parameter.group:ParamGroup._gather",
        "output = comm.allocate((numel,), dtype=layout.dtype, device=self.device)",
        "output = torch.empty(numel, dtype=layout.dtype, device=self.device)",
    ),
    "sums-not-taken-back": Edit(
        f"{_MODULE}.set_force_sum_reduction_for_comms", "force_sum = enable", "force_sum |= enable"
    ),
    "reduce-group-not-taken-back": Edit(
        "per_parameter.options:separate_reduce_group", "options.reduce_group = shared", "pass"
    ),
    "reduce-group-for-all-units": Edit(
        f"{_MODULE}.set_separate_reduce_scatter_group", "recurse=recurse", "recurse=True"
    ),
    "gathers-in-the-reduce-group": Edit(
        "per_parameter.reduction:Reducer._reduce_scatter",
        "process_group = group.options.reduce_group",
        "process_group = group.mesh.group",
    ),
    "resharding-of-all-units": Edit(f"{_MODULE}.set_reshard_after_forward", "recurse=recurse", "recurse=True"),
    "resharding-not-of-the-root": Edit(f"{_MODULE}.set_reshard_after_forward", "unit.auto_reshard = False", "pass"),
    "no-list-is-an-empty-one": Edit(f"{_MODULE}.set_modules_to_backward_prefetch", " if modules else None", ""),
    "resharding-only-off": Edit(
        f"{_MODULE}.set_reshard_after_forward",
        "after_forward(reshard_after_forward, unit",
        "after_forward(False, unit",
    ),
    "gathered-in-backward-anyway": Edit(
        f"{_MODULE}.set_unshard_in_backward", "unshard_in_backward = unshard_in_backward", "unshard_in_backward = True"
    ),
    "zeros-of-all-units": Edit(f"{_MODULE}.set_reduce_scatter_unused_params", "recurse=recurse", "recurse=True"),
    "zeros-not-taken-back": Edit(
        f"{_MODULE}.set_reduce_scatter_unused_params",
        "reduce_unused = reduce_scatter_unused_params",
        "reduce_unused |= reduce_scatter_unused_params",
    ),
    "zeros-of-nobody": Edit("per_parameter.reduction:take", "group.options.reduce_unused and", "False and"),
    # Backwards, hooks and lifetimes.
    "sequence-by-name": Edit(
        "per_parameter.unit:Unit._end_of_backward",
        "for unit in self.iteration.units:",
        "for unit in sorted(self.iteration.units, key=lambda unit: unit.group.label if unit.group else ''):",
    ),
    "second-backward-without-an-end": Edit(
        "per_parameter.unit:Unit._end_of_backward", "self.iteration.callback_queued = False", "pass"
    ),
    "freed-before-the-hooks-of-a-script": Edit(
        "per_parameter.unit:Unit.register",
        "register_forward_hook(self.post_forward)",
        "register_forward_hook(self.post_forward, prepend=True)",
    ),
    "gathered-after-the-hooks-of-a-script": Edit(
        "per_parameter.unit:Unit.register", "self.pre_forward, prepend=True,", "self.pre_forward,"
    ),
    "outputs-of-gathers-kept": Edit(
        "per_parameter.group:ParamGroup._copy_out",
        "rows = pending.output",
        "self.__dict__.setdefault('_outputs', []).append(pending.output)\n    rows = pending.output",
    ),
    "shares-kept-after-the-step": Edit(
        "per_parameter.reduction:Accumulator._add_views",
        "    for param, grad, view in",
        "    self._kept = shards\n    for param, grad, view in",
    ),
    "units-kept-by-a-list": Edit(
        "per_parameter.unit:Unit.register",
        "self.group.register()\n",
        "self.group.register()\n        hooks.__dict__.setdefault('kept', []).append(self)\n",
    ),
}

FLAT = {
    "flat-kept-after-forward": Edit(_ABANDON, "group.reshard()", "pass"),
    "flat-never-recovers": Edit("flat.unit:FlatUnit.recover", "self._recover()", "pass"),
    "flat-kept-after-backward": Edit(_RECOVER, "unit.group.reshard()", "pass"),
    "flat-unreduced-gradients-kept": Edit(_RECOVER, "unit.group.leaf.grad = None", "pass"),
    "flat-unreduced-for-ever": Edit(
        "flat.module:FullyShardedDataParallel.no_sync",
        "    finally:\n",
        "    except BaseException:\n        raise\n    else:\n",
    ),
    "flat-recovery-of-the-root-alone": Edit(_RECOVER, "self.iteration.units:", "[self]:"),
    "flat-hook-of-the-root-alone": Edit(
        "flat.module:FullyShardedDataParallel.register_comm_hook",
        "    if unit.reducer is not None:\n            unit.reducer.comm_hook = ",
        "    if unit is self._unit:\n            unit.reducer.comm_hook = ",
    ),
    "flat-hook-of-a-copy": Edit(
        "flat.reduction:Reducer._call_hook",
        "hook(state, contributions, shard)",
        "hook(state, contributions, shard.clone())",
    ),
    "flat-hook-inside-no-sync": Edit(
        "flat.unit:FlatUnit._on_gradient", "if self.syncs:", "if self.syncs or self.reducer.comm_hook:"
    ),
    "flat-gathers-before-though-after": Edit(
        "flat.unit:FlatUnit._pre_backward",
        "self.backward_prefetch is BackwardPrefetch.BACKWARD_PRE",
        "self.backward_prefetch is not None",
    ),
    "flat-gathers-though-never": Edit(
        "flat.unit:FlatUnit._reshard_after_backward",
        "self.backward_prefetch is BackwardPrefetch.BACKWARD_POST",
        "self.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE",
    ),
    "flat-forward-never-gathers-ahead": Edit(
        "flat.unit:FlatUnit.pre_forward", "if self.forward_prefetch and", "if False and"
    ),
    "flat-forward-always-gathers-ahead": Edit("flat.unit:FlatUnit.pre_forward", "if self.forward_prefetch and", "if"),
    "flat-forward-gathers-itself-ahead": Edit(
        "flat.unit:IterationContext.prefetch_next", "group.first_index + 1", "group.first_index"
    ),
    "flat-hook-of-what-is-divided": Edit(
        "flat.reduction:Reducer._call_hook",
        "hook(state, contributions, shard)",
        "hook(state, contributions / self._group.ranks.size, shard)",
    ),
    "flat-gradients-kept": Edit(
        "flat.reduction:Reducer._finish",
        "division = self._division(shard.dtype)",
        "self.__dict__.setdefault('_shards', []).append(shard)\n    division = self._division(shard.dtype)",
    ),
    "flat-kept-without-gradients": Edit("flat.unit:FlatUnit._finish_backward", "self.group.reshard()", "pass"),
    "flat-shares-kept-after-the-step": Edit(
        "flat.reduction:Gradients.add", "    given: list", "    self._kept = reduced\n    given: list"
    ),
    "flat-units-kept-by-a-list": Edit(
        "flat.unit:FlatUnit.share",
        "self.context = context",
        "self.context = context; hooks.__dict__.setdefault('kept', []).append(self)",
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})
