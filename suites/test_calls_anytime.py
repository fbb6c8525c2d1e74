"""Chapter CALLS: calls that change no training, in each state of a model and in each moment of its training."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from shardproof.suites.anytime import FAMILIES, change_of, train
from shardproof.testing import Capability, Rank, Run, contract, deadline, models, needs, world
from shardproof.testing.make import Accumulation, cut_over
from shardproof.testing.train import optim, parallel, recompute, ties

DIM = 9


def _plain(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return models.Tower(dim=DIM), {}


def _frozen(rank: Rank) -> tuple[Any, dict[str, Any]]:
    model = models.Tower(dim=DIM)
    model.layers[1].requires_grad_(False)
    model.get_parameter("layers.2.in_proj.bias").requires_grad_(False)
    return model, {}


def _empty(rank: Rank) -> tuple[Any, dict[str, Any]]:
    """A layer of one row in between, of which the last rank has nothing."""
    model = models.Tower(dim=DIM)
    model.layers.insert(1, nn.Sequential(nn.Linear(DIM, 1), nn.Linear(1, DIM)))
    return model, {}


def _checkpointed(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return models.Tower(dim=DIM), {"prepare": lambda model: recompute(model, "wrapper")}


def _tied(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return ties.TiedStack(DIM), {}


def _subgroup(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return models.Tower(dim=DIM), {"mesh": rank.mesh((2, 2), ("replicate", "shard"))["shard"]}


def _replicas(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return models.Tower(dim=DIM), {"mesh": rank.mesh((2, 2), ("replicate", "shard"))}


def _tensor_parallel(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return parallel.MLPStack(8), cut_over(rank.mesh((2, 2), ("dp", "tp")), parallel.parallelize_mlps)


def _kept(rank: Rank) -> tuple[Any, dict[str, Any]]:
    """Parameters that stay gathered until backward."""
    return models.Tower(dim=DIM), {"reshard_after_forward": False}


def _whole(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return models.Tower(dim=DIM), {"shards": False}


def _flat(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return models.Tower(dim=DIM), {"flat_parameters": True}


_STATES: dict[str, Callable[[Rank], tuple[Any, dict[str, Any]]]] = {
    "plain": _plain, "frozen": _frozen, "empty-shards": _empty, "checkpointed": _checkpointed, "tied": _tied,
    "subgroup": _subgroup, "replicas": _replicas, "tensor-parallel": _tensor_parallel,
    "tensor-parallel-deferred": _tensor_parallel,
    "kept": _kept, "whole": _whole, "flat": _flat,
}  # fmt: skip
UNITS = needs(Capability.MANUAL_RESHARD, Capability.ASYNC_UNSHARD)
WRAPPERS = needs(Capability.FSDP1_API)
FAMILY = pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(one, marks=UNITS) for one in ("modules", "dropped-unshards", "state-dicts", "optimizer-states")),
        *(pytest.param(one, marks=WRAPPERS) for one in ("wrappers", "wrapped-state-dicts", "wrapped-optimizer-states")),
    ],
)


@contract("CALLS-14")
@world(2)
@deadline(60)
@needs(Capability.DEFERRED_REDUCTION, Capability.OWN_OPTIMIZER)
@FAMILY
@pytest.mark.parametrize(
    "state",
    [
        "plain", "frozen", "empty-shards", "checkpointed", "tied",
        pytest.param("kept", marks=needs(Capability.RESHARD_AFTER_FORWARD)),
        pytest.param("whole", marks=needs(Capability.REPLICAS_ALONE)),
        pytest.param("flat", marks=needs(Capability.FLAT_PARAMETERS)),
    ],
)  # fmt: skip
def test_calls_that_change_nothing(rank: Rank, state: str, family: str) -> None:
    """Calls that read, or set what is in force, return the right values and change no training, at any moment."""
    check_calls(rank, state, family)


@contract("CALLS-14")
@world(4)
@deadline(60)
@needs(Capability.DEFERRED_REDUCTION, Capability.OWN_OPTIMIZER)
@FAMILY
@pytest.mark.parametrize(
    "state",
    [
        "subgroup", pytest.param("replicas", marks=needs(Capability.HYBRID)),
        pytest.param("tensor-parallel", marks=needs(Capability.TENSOR_PARALLEL)),
        pytest.param("tensor-parallel-deferred", marks=needs(Capability.TENSOR_PARALLEL)),
    ],
)  # fmt: skip
def test_calls_that_change_nothing_on_meshes(rank: Rank, state: str, family: str) -> None:
    """On a part of the ranks, on replicas and beside tensor parallelism such calls change no training either."""
    check_calls(rank, state, family)


def check_calls(rank: Rank, state: str, family: str) -> None:
    """Make all calls of a family in all moments of a training; if that changes it, find the calls that do."""
    model, options = _STATES[state](rank)
    # torch's wrappers raise beside it in the microbatch after a deferred one: findings/F403.py
    count = 1 if state == "tensor-parallel" else 2
    # One state alone: on the CPU older calls save the last of several in place of each: findings/F171.py.
    optimizer = optim.sgd() if family == "wrapped-optimizer-states" else optim.adamw()
    options |= {"optimizer": optimizer, "microbatches": count, "accumulation": Accumulation()}

    def make() -> Run:
        return rank.run(models.copy_of(model), units=model.units(), **options)

    mesh = options.get("mesh")
    batches = [
        [
            rank.batch(step, (4, 8 if "parallel" in state else DIM), microbatch=number, mesh=mesh)
            for number in range(count)
        ]
        for step in range(3)
    ]
    expected = train(rank, make(), batches, lambda *_: None)
    if (changed := change_of(rank, make, batches, expected, FAMILIES[family])) is None:
        return
    alone = ((call.name, change_of(rank, make, batches, expected, [call])) for call in FAMILIES[family])
    culprits = itertools.islice((f"{name}: {text}" for name, text in alone if text is not None), 3)
    raise AssertionError("\n".join([f"calls that are to change nothing: {changed}", "by themselves:", *culprits]))
