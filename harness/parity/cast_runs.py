"""Trains a model of ``models.mixed`` beside the baseline that makes the same casts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardproof.harness.models import optim
from shardproof.harness.parity.casts import CastReplica, check_equal, check_evaluation, run_and_replica
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.run import Run

#: Of the batches.
SHAPE = (6, 4)


def both(rank: Rank, model: nn.Module, *, lr: float = 0.05, **options: Any) -> tuple[Run, CastReplica]:
    """The sharded run and the baseline with the same casts."""
    return run_and_replica(rank, model, optimizer=optim.sgd(lr=lr), **{"units": [["low"], ["high"]]} | options)


def train(rank: Rank, run: Run, replica: CastReplica, *, first: int = 0, steps: int = 3, chooses: bool = False) -> None:
    """Train both and compare every step."""
    for step in range(first, first + steps):
        batch: list[tuple[torch.Tensor, ...]] = []
        for number in range(run.adapter.config.microbatches):
            x = rank.batch(step, SHAPE, microbatch=number, mesh=run.adapter.config.mesh)
            batch.append((x, (x * 7).long()) if chooses else (x,))
        expected = replica.step(batch, loss=torch.sum)
        check_equal(rank, run, run.step(batch, loss=torch.sum), expected, number=step)


def evaluate_and_train(rank: Rank, run: Run, replica: CastReplica, *, first: int = 0) -> None:
    """Three times, evaluate and train a step, and compare."""
    for step in range(first, first + 3):
        for module in (run.adapter.module, replica.model):
            module.eval()
        check_evaluation(rank, run, replica, rank.batch(step, SHAPE, microbatch=1), number=step)
        for module in (run.adapter.module, replica.model):
            module.train()
        train(rank, run, replica, first=step, steps=1)


def assert_collectives(run: Run, *, gathers: set[torch.dtype], reduces: set[torch.dtype]) -> None:
    """Check the dtypes of all collectives of a run among its data-parallel ranks."""
    # What is not sharded is not gathered.
    gathers = gathers if "parameters" in run.adapter.traits.shards else set()
    kinds = {"all_gather": gathers, "reduce_scatter": reduces, "all_reduce": reduces}
    trace = [item for item in run.trace if set(item.group) <= set(run.adapter.config.data_ranks)]
    for item in trace:
        expected = {str(dtype).removeprefix("torch.") for dtype in kinds[item.kind]}
        assert item.dtype in expected, f"{item} should be of {' or '.join(sorted(expected))}"
    found = {item.dtype for item in trace if item.kind == "all_gather"}
    assert len(found) == len(gathers), f"units are gathered in {', '.join(sorted(found))} alone"
