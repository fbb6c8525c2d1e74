"""Chapter DRAWN: what an implementation claims, three features at a time."""

import contextlib
import functools
import itertools
import math
import pathlib
from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from torch import nn

from shardproof.suites import crossed
from shardproof.testing import Rank, Run, contract, models, needs, world
from shardproof.testing.casts import CastReplica, check_equal, check_evaluation
from shardproof.testing.compare import check_bits
from shardproof.testing.make import Accumulation, Clip, FullParams, Precision
from shardproof.testing.train import Means, compiler, optim, recompute

ROWS = crossed.rows_of(pathlib.Path(__file__).with_name("crossed.toml"))
DIM = 5

#: Its maximum is the same in whatever order ranks compute it, and far below the largest gradient.
CLIP = Clip(max_norm=2.0**-12, norm_type=math.inf)
PRECISIONS = {
    "full": Precision(),
    "bf16": Precision(param_dtype=torch.bfloat16),
    "bf16-fp32": Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
ACCUMULATIONS = {"deferred": Accumulation(), "kept": Accumulation(reshard_after_backward=False)}


class Layer(nn.Module):
    """Linear(dim, width) and back, times a gain of dim elements; where tied, beside one with the first's weight."""

    def __init__(self, dim: int, width: int, *, is_tied: bool) -> None:
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(dim, width), nn.Linear(width, dim), nn.Parameter(torch.randn(dim))
        self.again = nn.Linear(dim, width) if is_tied else None
        if self.again is not None:
            self.again.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(x))
        if self.again is not None:
            inner = inner + self.again(x)
        found: torch.Tensor = self.down(inner) * self.gain
        return found


class Layers(models.Stacked):
    """Three layers of different sizes, each a unit, and a linear one in the root's own."""

    def __init__(self, row: crossed.Row) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(DIM, DIM + n, is_tied=row["tied"] == "yes") for n in range(3))
        self.out = nn.Linear(DIM, DIM)
        if row["frozen"] == "unit":
            self.layers[0].requires_grad_(False)
        elif row["frozen"] == "part":
            self.layers[1].get_parameter("gain").requires_grad_(False)


def rows(*, on_replicas: bool) -> pytest.MarkDecorator:
    """The rows of the table that have replicas or have none, as values of a parameter."""
    found = [row for row in ROWS if (row["strategy"] == "replicas") == on_replicas]
    values = [pytest.param(row, id=crossed.name_of(row), marks=needs(*crossed.needs_of(row))) for row in found]
    return pytest.mark.parametrize("row", values)


@contract("DRAWN-2")
@world(2)
@rows(on_replicas=False)
def test_crossed(rank: Rank, row: Mapping[str, str]) -> None:
    """Features that an implementation claims train together as full copies with the same casts do, bit for bit."""
    train(rank, row)


@contract("DRAWN-2")
@world(4)
@rows(on_replicas=True)
def test_crossed_on_replicas(rank: Rank, row: Mapping[str, str]) -> None:
    """So they do on replicas of shards."""
    train(rank, row)


def train(rank: Rank, row: crossed.Row) -> None:
    """Train three steps of a row, and compare each with the copies."""
    model = Layers(row)
    plain = models.copy_of(model)
    with contextlib.ExitStack() as stack:
        prepare: list[Any] = []
        if row["compiled"] == "yes":
            prepare.append(stack.enter_context(compiler("aot_eager")).compile_layers)
        if (means := row["recomputed"]) != "no":
            prepare.append(functools.partial(recompute, means=cast(Means, means)))
        run = rank.run(model, optimizer=optim.sgd(), units=model.units(), **options_of(rank, row, prepare))
        step = clipped if row["clip"] == "yes" else None
        replica = CastReplica(
            rank, plain, config=run.adapter.config, optimizer=optim.sgd(), traits=run.adapter.traits, step=step
        )
        if row["ahead"] == "named":
            names = [unit[0] for unit in model.units()]
            following = {name: [other] for name, other in itertools.pairwise(names)}
            run.adapter.prefetch(forward=following, backward={other: [name] for name, [other] in following.items()})
        for number in range(3):
            prepare_step(rank, row, run, replica, number)
            batch = [
                (batch_of(rank, run, number, index).requires_grad_(row["recomputed"] == "reentrant-call"),)
                for index in range(run.adapter.config.microbatches)
            ]
            expected = replica.step(batch, loss=models.mean_square)
            check_equal(rank, run, run.step(batch, loss=models.mean_square), expected, number=number)
            if row["state"] != "none":
                form: Any = row["state"]
                run.adapter.restore(run.adapter.checkpoint(form=form), form=form)


def options_of(rank: Rank, row: crossed.Row, prepare: list[Any]) -> dict[str, Any]:
    """Return how a row's run is sharded and driven."""
    on_replicas = row["strategy"] == "replicas"
    return {
        "mesh": rank.mesh((2, 2), ("replicate", "shard")) if on_replicas else rank.mesh(),
        "shards": row["strategy"] != "whole",
        "flat_parameters": row["parameters"] == "flat",
        "precision": PRECISIONS[row["precision"]],
        "reshard_after_forward": {"default": None, "yes": True, "no": False}[row["reshards"]],
        "offload": "pageable" if row["offload"] == "pageable" else None,
        "backward_prefetch": "none" if row["ahead"] == "never" else None,
        "forward_prefetch": True if row["ahead"] == "in-forward" else None,
        "microbatches": 1 if row["microbatches"] == "one" else 2,
        "accumulation": ACCUMULATIONS.get(row["microbatches"]),
        "clip": CLIP if row["clip"] == "yes" else None,
        "prepare": (lambda model: functools.reduce(lambda made, one: one(made), prepare, model)) if prepare else None,
        "is_traced": row["compiled"] == "no",
    }


def prepare_step(rank: Rank, row: crossed.Row, run: Run, replica: CastReplica, number: int) -> None:
    """Do what a row does before each step."""
    if row["before"] == "evaluation":
        check_evaluation(rank, run, replica, batch_of(rank, run, number, 9), number=number)
    elif row["before"] == "unshard":
        run.adapter.unshard()
    elif row["before"] == "read":
        with run.adapter.summon_full_params(FullParams(writeback=False)) as found:
            for name, expected in replica.held_parameters().items():
                check_bits(f"full {name!r} before step {number}", found[name].detach(), expected.detach())


def batch_of(rank: Rank, run: Run, step: int, microbatch: int) -> torch.Tensor:
    return rank.batch(step, (3, DIM), microbatch=microbatch, mesh=run.adapter.config.mesh)


def clipped(trainee: Any) -> None:
    """Clip and step the copies, as the sharded run does."""
    nn.utils.clip_grad_norm_(trainee.held_parameters().values(), CLIP.max_norm, CLIP.norm_type)
    trainee.optimizer.step()
