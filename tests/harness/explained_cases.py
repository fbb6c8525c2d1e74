"""Cases for the tests of ``--explain``: small trainings, each of which asks one thing of an implementation."""

import torch
from torch import nn

from shardproof.harness.adapters.base import Clip, Precision
from shardproof.harness.models import mixed, optim
from shardproof.harness.models.shapes import Stateful
from shardproof.harness.models.ties import TiedMLP, TiedStack
from shardproof.harness.parity.rank import Rank
from shardproof.testing import models, world
from shardproof.testing.casts import run_and_replica, step_and_check

DIM = 7


def train(rank: Rank, model: nn.Module, *, shape: tuple[int, ...] = (4, DIM), **options: object) -> None:
    """Train a pair three steps, and compare each."""
    pair = rank.pair(model, **({"units": model.units()} | options))
    for step in range(3):
        microbatches = range(pair.adapter.config.microbatches)
        batch = [rank.batch(step, shape, microbatch=index) for index in microbatches]
        pair.step(batch)
        pair.check()


@world(2)
def test_tower(rank: Rank) -> None:
    train(rank, models.Tower(DIM))


@world(4)
def test_replicas(rank: Rank) -> None:
    train(rank, models.Tower(DIM), mesh=rank.mesh((2, 2), ("replicate", "shard")))


@world(2)
def test_clipped(rank: Rank) -> None:
    train(rank, models.Tower(DIM), clip=Clip(1e-3))


@world(2)
def test_accumulated(rank: Rank) -> None:
    train(rank, models.Tower(DIM), microbatches=2)


@world(2)
def test_tied(rank: Rank) -> None:
    train(rank, TiedStack(DIM, layer=TiedMLP))


@world(2)
def test_buffers(rank: Rank) -> None:
    train(rank, Stateful(DIM, freezes=False))


@world(2)
def test_evaluated(rank: Rank) -> None:
    model = models.Tower(DIM)
    pair = rank.pair(model, units=model.units())
    pair.step(rank.batch(0, (4, DIM)))
    pair.evaluate(rank.batch(1, (4, DIM)))
    pair.check()


@world(2)
def test_casts(rank: Rank) -> None:
    low = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = mixed.Mixed(7, 5)
    run, replica = run_and_replica(rank, model, units=[["low"], ["high"]], optimizer=optim.sgd(), precision=low)
    for step in range(2):
        step_and_check(rank, run, replica, [(rank.batch(step, (7, 5)),)], number=step)


@world(2)
def test_counted(rank: Rank) -> None:
    model = models.Tower(DIM)
    pair = rank.pair(model, units=model.units())
    pair.step(rank.batch(0, (4, DIM)))
    pair.check_counts("forward", all_gather=4)
    pair.check()


@world(2)
def test_recomputed(rank: Rank) -> None:
    model = models.Tower(DIM)
    model.calls = "recomputed"
    train(rank, model)
