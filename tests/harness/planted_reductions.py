"""Adapters of a reference of which one place is edited: reductions, accumulation, clipping, layout and resharding.

A bug is an edit of the source of one function, so that this page shows what is wrong. The function is edited before the
first model of a case is sharded, and put back when the case has ended. The next bug has the same ranks, unless they can
run no further case.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import textwrap
from typing import Any, ClassVar

from shardproof.harness.adapters.base import Adapter, Config
from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted import Planting, replace


@dataclasses.dataclass(frozen=True)
class Edit:
    """One edit of the source of a function.

    Attributes:
        place: the function, as "module:name" or "module:Class.name", in ``fsdp_impl``.
        old: a text that its source has once.
        new: the text that replaces it.
        is_apart: whether it needs fresh ranks, since what it does depends on what they have run before.
    """

    place: str
    old: str
    new: str
    is_apart: bool = False

    def apply(self) -> None:
        """Replace the function wherever ``fsdp_impl`` holds it, until the case ends."""
        owner, name = self._found()
        found = getattr(owner, name)
        edited = self.edited()
        replace(owner, name, edited)
        for module in [module for key, module in sys.modules.items() if key.partition(".")[0] == "fsdp_impl"]:
            for key, value in list(vars(module).items()):
                if value is found:
                    replace(module, key, edited)

    def edited(self) -> Any:
        """The function as it is after the edit.

        Raises:
            AssertionError: its source has the old text more than once, or not at all.
        """
        owner, name = self._found()
        function = inspect.unwrap(getattr(owner, name))
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.place} has {self.old!r} {source.count(self.old)} times"
        made: dict[str, Any] = {}
        code = compile(source.replace(self.old, self.new), f"{self.place} (edited)", "exec", dont_inherit=True)
        exec(code, function.__globals__, made)
        return made[name]

    def _found(self) -> tuple[Any, str]:
        """The module or class that has the function, and its name there."""
        module_name, _, path = self.place.partition(":")
        owner: Any = importlib.import_module(f"fsdp_impl.{module_name}")
        *classes, name = path.split(".")
        for part in classes:
            owner = getattr(owner, part)
        return owner, name


class Edited(Planting):
    """Applies an edit."""

    edit: ClassVar[Edit]

    def plant(self) -> None:
        self.edit.apply()


PER_PARAMETER = {
    # Reductions, and what is kept until one.
    "partial-shards-dropped": Edit(
        "per_parameter.reduction:Reducer._with_partial", "        summed.shards.add_(partial.shards)\n", ""
    ),
    "other-partial-dropped": Edit(
        "per_parameter.reduction:Reducer._with_partial", "for part in (partial, summed):", "for part in (summed,):"
    ),
    "partial-never-completed": Edit(
        "per_parameter.reduction:Reducer.reduce",
        "self._partial is not None and group.options.all_reduce_grads",
        "False",
    ),
    "partial-kept": Edit(
        "per_parameter.reduction:Reducer._with_partial",
        "partial, self._partial = self._partial, None",
        "partial = self._partial",
    ),
    "all-reduce-sums": Edit("common.divide:divide", "all_reduce_op=ReduceOp.AVG", "all_reduce_op=ReduceOp.SUM"),
    "all-reduce-over-shards": Edit(
        "per_parameter.reduction:Reducer._finish",
        "total.shards, group.mesh.replicas,",
        "total.shards, group.mesh.group,",
    ),
    "all-reduce-skipped-for-one-shard": Edit(
        "per_parameter.reduction:Reducer._finish",
        "if group.mesh.replicas is not None:",
        "if group.mesh.replicas is not None and group.mesh.size > 1:",
    ),
    "all-reduce-of-a-copy-in-double": Edit(
        "per_parameter.reduction:Reducer._finish",
        "collectives.all_reduce(total.shards, group.mesh.replicas, division.all_reduce_op, unit=group.label)",
        "wide = total.shards.double(); collectives.all_reduce(wide, group.mesh.replicas, division.all_reduce_op, "
        "unit=group.label); total.shards.copy_(wide)",
    ),
    "stray-all-reduce-over-the-world": Edit(
        "per_parameter.reduction:Reducer._finish",
        "    with streams.use(stream):\n",
        "    torch.distributed.all_reduce(torch.zeros(1))\n    with streams.use(stream):\n",
    ),
    "unit-without-backward-not-reduced": Edit(
        "per_parameter.unit:Unit._end_of_backward",
        "            unit._post_backward()\n",
        "            unit.group.reshard()\n",
    ),
    # Accumulation.
    "existing-gradients-dropped": Edit(
        "per_parameter.reduction:Accumulator._add_views", "    if existing:\n", "    if False:\n"
    ),
    "current-without-the-same-parameters": Edit(
        "per_parameter.reduction:Accumulator.add", " and last.params == tuple(params)", ""
    ),
    "buffer-replaced": Edit("per_parameter.reduction:Accumulator.add", "buffer.add_(shards)", "buffer.copy_(shards)"),
    "replaced-gradient-is-current": Edit(
        "common.views:Views.whole",
        "tensor is None or tensor is not made() or tensor.data_ptr() != address",
        "tensor is None",
    ),
    "gradient-not-taken": Edit(
        "per_parameter.reduction:_take_one",
        "grad, param.unsharded.grad = param.unsharded.grad, None",
        "grad = param.unsharded.grad",
    ),
    "unreduced-dropped": Edit(
        "per_parameter.unit:Unit._post_backward",
        "        reduction.accumulate(group)\n",
        "        reduction.drop(group)\n",
    ),
    "root-only-recurses": Edit(
        "per_parameter.module:FSDPModule.set_requires_gradient_sync",
        "self._groups(recurse=recurse)",
        "self._groups(recurse=True)",
    ),
    "all-reduce-flag-stops-all": Edit(
        "per_parameter.module:FSDPModule.set_requires_all_reduce",
        "group.options.all_reduce_grads = requires_all_reduce",
        "group.options.reduce_grads = group.options.all_reduce_grads = requires_all_reduce",
    ),
    "kept-after-backward-ignored": Edit(
        "per_parameter.module:FSDPModule.set_reshard_after_backward",
        "group.options.reshard_after_backward = reshard_after_backward",
        "pass",
    ),
    "last-backward-ignored": Edit(
        "per_parameter.module:FSDPModule.set_is_last_backward",
        "self._unit().iteration.is_last_backward = is_last_backward",
        "pass",
    ),
    "indices-forgotten-early": Edit(
        "per_parameter.unit:Unit._end_of_backward",
        "unit.group.phase = Phase.IDLE\n",
        "unit.group.phase = Phase.IDLE; unit.group.forward_indices.clear()\n",
    ),
    # Units and resharding.
    "backward-gathers-world": Edit(
        "per_parameter.group:ParamGroup._gather_source", "if self._smaller is not None:", "if False:"
    ),
    "kept-after-backward": Edit(
        "per_parameter.group:ParamGroup.reshard",
        "if self.phase is Phase.FORWARD:",
        "if self.phase in (Phase.FORWARD, Phase.POST_BACKWARD):",
    ),
    "smaller-shards-reversed": Edit(
        "per_parameter.group:_part_of", "mesh.size, mesh.rank)", "mesh.size, mesh.size - 1 - mesh.rank)"
    ),
    "strided-groups": Edit(
        "per_parameter.mesh:_smaller_mesh",
        "mesh.mesh.mesh.view(-1, size)",
        "mesh.mesh.mesh.view(size, -1).t()",
    ),
    "root-frees-by-default": Edit("per_parameter.lazy_init:_join", "if root.auto_reshard and", "if False and"),
    "kept-without-autograd": Edit(
        "per_parameter.unit:Unit._complete_forward",
        "if not hooks.in_backward():",
        "if not hooks.in_backward() and torch.is_grad_enabled():",
    ),
    "skipped-member-never-completes": Edit(
        "per_parameter.unit:Unit._root_post_forward", "if unit is not self and unit.to_run:", "if False:"
    ),
    "gathered-for-each-module": Edit(
        "per_parameter.unit:Unit.post_forward", "    if self.to_run:\n", "    if False:\n"
    ),
    "frozen-thawed": Edit(
        "per_parameter.param:ShardedParam.__init__", "requires_grad=original.requires_grad", "requires_grad=True"
    ),
    "smaller-shards-thawed": Edit(
        "per_parameter.group:SmallerShards.__init__",
        "requires_grad=param.sharded.requires_grad",
        "requires_grad=True",
    ),
    # The norm.
    "norm-counts-replicas": Edit("common.clip:sharding_groups", "if not isinstance(placement, Replicate):", "if True:"),
    "gradients-scaled-up": Edit("common.clip:scale_to", ", max=1.0)", ", max=float('inf'))"),
    "large-epsilon": Edit("common.clip:scale_to", "+ 1e-6), max", "+ 1e-4), max"),
    "powers-not-taken": Edit("common.norm:local_share", "norms.pow(p).sum()", "norms.sum()"),
    "always-a-square-root": Edit("common.norm:finish", "value.pow(1.0 / p)", "value.sqrt()"),
    "inf-norm-summed-over-ranks": Edit("common.norm:reduce_norm", "dist.ReduceOp.MAX if math.isinf(p) else ", ""),
    "inf-norm-summed-over-shares": Edit("common.norm:combine", "stacked.amax(dim=0) if math.isinf(p) else ", ""),
    "norm-of-empty-shards": Edit("common.norm:local_share", "if tensor.numel() > 0]", "]"),
    "empty-rank-leaves-the-norm": Edit(
        "common.clip:combine_over_ranks",
        "        shares = _reduce_over(group, shares, p)\n",
        "        empty = all(float(share[0]) == 0 for share in shares.values())\n"
        "        shares = {(): next(iter(shares.values()))} if empty else _reduce_over(group, shares, p)\n",
    ),
}

FLAT = {
    "flat-buffer-replaced": Edit("flat.reduction:Gradients.add", "buffer.add_(reduced)", "buffer.copy_(reduced)"),
    "flat-existing-replaced": Edit("flat.reduction:Gradients.add", "param.grad.add_(view)", "param.grad.copy_(view)"),
    "flat-aside-lost": Edit(
        "flat.reduction:Gradients.hide_unsharded", "if aside is not None and not dropped:", "if False:"
    ),
    "flat-gradient-not-taken": Edit(
        "flat.unit:FlatUnit._reduce", "grad, leaf.grad = leaf.grad, None", "grad = leaf.grad"
    ),
    "flat-unit-without-backward-not-reduced": Edit(
        "flat.unit:FlatUnit._finish_backward", "if self.syncs:", "if False:"
    ),
    "flat-always-frees": Edit(
        "flat.unit:FlatUnit._frees_after_backward", "self.syncs or self.strategy.reshards_after_forward", "True"
    ),
    "flat-no-sync-of-the-root": Edit(
        "flat.module:FullyShardedDataParallel.no_sync",
        "    for unit in units:\n        unit.syncs = False",
        "    for unit in units[:1]:\n        unit.syncs = False",
    ),
    "flat-no-sync-for-good": Edit(
        "flat.module:FullyShardedDataParallel.no_sync", "unit.syncs = syncs", "unit.syncs = syncs and unit.is_root"
    ),
    "flat-all-reduce-over-shards": Edit(
        "flat.reduction:Reducer._finish",
        "collectives.all_reduce(shard, replicas,",
        "collectives.all_reduce(shard, group.ranks.shard_group,",
    ),
    "flat-empty-rank-leaves-the-norm": Edit("flat.reduction:_parts", "        yield data_parallel, None\n", ""),
    "flat-frozen-gets-gradients": Edit("flat.shards:FlatShards.holders", " and param.requires_grad", ""),
    "flat-groups-swapped": Edit(
        "flat.ranks:_resolve_hybrid",
        "replicas, group = device_mesh.get_group(mesh_dim=0)",
        "group, replicas = device_mesh.get_group(mesh_dim=0)",
    ),
    "flat-norm-of-one-unit": Edit(
        "flat.reduction:clip_grad_norm",
        "    for group in groups:\n        grads +=",
        "    for group in groups[:1]:\n        grads +=",
    ),
    "flat-root-frees": Edit("flat.unit:FlatUnit._frees_after_forward", " and not self.is_root", ""),
}


class SplitUnits(ReferenceAdapter):
    """Each module of a unit becomes a unit of its own."""

    name = "split-units"

    def __init__(self, model: Any, *, optimizer: Any, config: Config) -> None:
        apart = tuple((name,) for unit in config.units for name in unit)
        super().__init__(model, optimizer=optimizer, config=dataclasses.replace(config, units=apart))


class IgnoredOffload(ReferenceAdapter):
    """The policy that keeps shards on the CPU is not passed on."""

    name = "ignored-offload"

    def __init__(self, model: Any, *, optimizer: Any, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=dataclasses.replace(config, offload=None))


def edited(module: str, edits: dict[type[Adapter], dict[str, Edit]]) -> dict[str, type[Adapter]]:
    """Make an adapter for each edit, and let its module have it under its name, by which ``--impl`` finds it.

    Args:
        module: the name of the module.
        edits: for each sound adapter, its edits by the names of the bugs.

    Returns:
        The adapters by the names of their bugs.
    """
    adapters: dict[str, type[Adapter]] = {
        name: type(
            name.replace("-", "_"),
            (Edited, base),
            {
                "name": name,
                "edit": edit,
                "traits": dataclasses.replace(base.traits, isolation="adapter" if edit.is_apart else "shared"),
                "__module__": module,
            },
        )
        for base, mine in edits.items()
        for name, edit in mine.items()
    }
    vars(sys.modules[module]).update({adapter.__name__: adapter for adapter in adapters.values()})
    return adapters


#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})
ADAPTERS |= {adapter.name: adapter for adapter in (SplitUnits, IgnoredOffload)}
