"""Implementations with one changed place each, for the chapters RECOMPUTATION, TIED, ORDER, COMPOSITION and RESUME.

A bug replaces one text in the source of one function of ``fsdp_impl``, for one case.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import Any, ClassVar

from fsdp_impl.common import collectives, order
from fsdp_impl.flat import construct as flat_construct
from fsdp_impl.flat import group, optim_state, shards, state_dict
from fsdp_impl.flat import unit as flat_unit
from fsdp_impl.per_parameter import construct, mesh, param, reduction
from fsdp_impl.per_parameter import unit as parameter_unit
from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted import Planting, replace


def source_of(owner: Any, name: str, old: str, new: str) -> str:
    """The source of a function or method with ``new`` in the place of ``old``, which occurs once.

    Args:
        owner: the module or class that has the function.
        name: its name there.
        old: a part of its source.
        new: what takes the place.
    """
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(owner, name))))
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {name}"
    return source.replace(old, new)


class _Edited(Planting):
    """Changes the source of one function."""

    place: ClassVar[tuple[Any, str, str, str]]
    source: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "place"):
            # Here, so that a place that has moved fails the import, and is not taken for a caught bug.
            cls.source = source_of(*cls.place)

    def plant(self) -> None:
        owner, name, *_ = type(self).place
        made: dict[str, Any] = {}
        function = inspect.unwrap(getattr(owner, name))
        exec(compile(self.source, f"<planted {name}>", "exec"), function.__globals__, made)
        replace(owner, name, made[name])


class _PerParameter(_Edited, ReferenceAdapter): ...


class _Flat(_Edited, ReferenceFlatAdapter): ...


# Recomputation


class NothingRecomputed(ReferenceAdapter):
    """Layers that their caller recomputes are called once, and keep their activations (appendix A, 6)."""

    name = "nothing-recomputed"

    def __init__(self, model: Any, **options: Any) -> None:
        model.calls = "plain"
        super().__init__(model, **options)


class ReshardsInRecomputation(_PerParameter):
    """A unit that is recomputed re-entrantly is freed before its backward, which gathers it again."""

    name = "reshards-in-recomputation"
    place = (parameter_unit.Unit, "_complete_forward", "if not hooks.in_backward():", "if True:")


class FlatReshardsInRecomputation(_Flat):
    name = "flat-reshards-in-recomputation"
    place = (flat_unit.FlatUnit, "post_forward", " and not hooks.in_backward()", "")


class RecomputesWithoutGather(_PerParameter):
    """A recomputation finds what an earlier backward of the same unit has freed."""

    name = "recomputes-without-gather"
    place = (
        parameter_unit.Unit,
        "pre_forward",
        "        self._unshard_now()\n        return",
        "        return",
    )


# Tied parameters


class TiedInOnePlace(_PerParameter):
    """Only the first module that holds a shared parameter gets the gathered or sharded one."""

    name = "tied-in-one-place"
    place = (param.ShardedParam, "register", "in self.owners:", "in self.owners[:1]:")


class TiedUnknownElsewhere(_PerParameter):
    """Only the first module that holds a shared parameter is found."""

    name = "tied-unknown-elsewhere"
    place = (construct, "owners_of", "if param is not None and param in owners:",
             "if param is not None and param in owners and not owners[param]:")  # fmt: skip


class FlatTiedInOnePlace(_Flat):
    """Only the first module that holds a shared parameter computes with the gathered one."""

    name = "flat-tied-in-one-place"
    place = (group.FlatGroup, "register_unsharded", "for owner in owners:", "for owner in owners[:1]:")


class FlatTiedShardInOnePlace(_Flat):
    """Only the first module that holds a shared parameter gets the shard back."""

    name = "flat-tied-shard-in-one-place"
    place = (shards.FlatShards, "register", "for owner in owners:", "for owner in owners[:1]:")


# Order


class EndIsNotCompared(_PerParameter):
    """A rank whose forward ends earlier is not noticed in the first iteration."""

    name = "end-is-not-compared"
    place = (order.OrderCheck, "end", "self._compare_ranks(None, group)", "pass")


class EarlyEndGivesNoWarning(_PerParameter):
    """A forward that ends earlier than that of the first iteration gives no warning."""

    name = "early-end-gives-no-warning"
    place = (order.OrderCheck, "end", "if self._position < len(self._first):", "if False:")


class WrongCategory(_PerParameter):
    """The warning is one that Python hides by default."""

    name = "wrong-category"
    place = (order.OrderCheck, "_warn", "stacklevel=4", "category=DeprecationWarning, stacklevel=4")


class ShortSentence(_PerParameter):
    """The warning does not say what may happen."""

    name = "short-sentence"
    place = (order.OrderCheck, "_warn", "may give incorrect results or hang", "may hang")


class PositionGoesOn(_PerParameter):
    """Each iteration is compared with what comes after the first one."""

    name = "position-goes-on"
    place = (order.OrderCheck, "begin", "self._position = 0", "self._position += 0")


class WarnsInEvaluation(_PerParameter):
    """Forwards in eval mode are compared too."""

    name = "warns-in-evaluation"
    place = (order.OrderCheck, "begin", "training and ", "")


class Thawed(_PerParameter):
    """Sharding makes frozen parameters trainable (appendix A, 13)."""

    name = "thawed"
    place = (param.ShardedParam, "__init__", "requires_grad=original.requires_grad", "requires_grad=True")


class FlatNeverFreezes(_Flat):
    """A flat parameter is trainable whatever its parameters are."""

    name = "flat-never-freezes"
    place = (shards.FlatShards, "sync_requires_grad",
             "self.flat.requires_grad_(any(param.requires_grad for param in self.originals))",
             "[param.requires_grad_(True) for param in (self.flat, *self.originals)]")  # fmt: skip


# Composition


class PlainShard(_PerParameter):
    """A dimension that tensor parallelism has cut is placed as if data parallelism had cut it first."""

    name = "plain-shard"
    place = (param, "_shard", "if split_factor > 1", "if split_factor > 2")


class TensorParallelFirst(_PerParameter):
    """The mesh of a sharded parameter lists the tensor-parallel dimension first."""

    name = "tensor-parallel-first"
    place = (param, "_cut_tensor_parallel",
             "concatenate([mesh.mesh, old.mesh]), (*mesh.placements(shard), *old.placements)",
             "concatenate([old.mesh, mesh.mesh]), (*old.placements, *mesh.placements(shard))")  # fmt: skip


class PendingSum(_PerParameter):
    """The gradient of a replicated DTensor is this rank's own part of the sum."""

    name = "pending-sum"
    place = (reduction, "_local_grad", "if grad.placements != wanted:", "if False:")


class StrayWorld(_PerParameter):
    """Each reduction is followed by an all-reduce of the whole world (appendix A, 14)."""

    name = "stray-world"
    place = (collectives, "reduce", "op=op)", "op=op)\n    dist.all_reduce(torch.zeros(1, device=output.device))")


class PipelineAverage(_PerParameter):
    """Gradients are averaged over the stages of a pipeline too (appendix A, 10)."""

    name = "pipeline-average"
    place = (collectives, "reduce", "op=op)", """op=op)
    first = dist.get_rank() % 2
    groups = dist.distributed_c10d._world.pg_map
    pipeline = next(group for group in groups if dist.get_process_group_ranks(group) == [first, first + 2])
    dist.all_reduce(output, group=pipeline)
    output.div_(2)
""")  # fmt: skip


class ShardsOverReplicas(_PerParameter):
    """The groups of a (replicate, shard) mesh are mixed up."""

    name = "shards-over-replicas"
    place = (
        mesh.ShardMesh,
        "__post_init__",
        '"replicas": self.mesh.get_group(0)',
        '"replicas": self.mesh.get_group(last)',
    )


class FirstRankOfShards(_Flat):
    """Values are sent within the shards before they are sent across replicas."""

    name = "first-rank-of-shards"
    place = (flat_construct, "sync_states", "[ranks.across, ranks.group]", "[ranks.group]")


class LastRanksValues(_Flat):
    """The last rank's values are sent instead of the first's."""

    name = "last-ranks-values"
    place = (flat_construct, "_broadcast", "group_src=0", "group_src=group.size() - 1")


class FloatingBuffersOnly(_Flat):
    """Integer buffers are not sent."""

    name = "floating-buffers-only"
    place = (
        flat_construct,
        "sync_states",
        "for tensor in tensors]",
        "for tensor in tensors if tensor.is_floating_point()]",
    )


# Checkpoints


class OwnLearningRate(_Flat):
    """Loading keeps the learning rate of the optimizer that is loaded into."""

    name = "own-learning-rate"
    place = (optim_state, "_options_for", "for group in given:", "for group in ():")


class OneNameOfTied(_Flat):
    """A shared parameter is saved under one of its names."""

    name = "one-name-of-tied"
    place = (state_dict, "keys_of", "for owner in owners\n", "for owner in owners[:1]\n")


class RowsMisplaced(_Flat):
    """Rows of a tensor-parallel part are saved at the places of a plain shard."""

    name = "rows-misplaced"
    place = (state_dict, "_rows", "if pieces > 1", "if pieces > 2")


class ForgottenMoments(_Flat):
    """What is laid out like a parameter is saved as zeros."""

    name = "forgotten-moments"
    place = (optim_state, "_whole_states", ".copy_(state[key])", ".copy_(state[key] * 0)")


class StateOfTheOldPlace(_Flat):
    """The moments of a parameter are cut where its neighbour lies."""

    name = "state-of-the-old-place"
    place = (optim_state, "_shard_state", "cut_one(index, local)", "cut_one(index, local.flip(0))")
