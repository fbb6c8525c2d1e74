"""Chapter RESUME: training goes on from a checkpoint as if it had never stopped."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.models import optim
from shardproof.harness.models.parallel import SplitTransformer, parallelize_transformer
from shardproof.harness.parity import Rank, Run, check_exact, resume

pytestmark = needs(Capability.DISTRIBUTED_CHECKPOINT, Capability.ADAM)

#: Whether the run that goes on is the one that was saved, spoilt in between, or one made anew from other values.
REUSES = pytest.mark.parametrize("reuses", [False, True], ids=["new-run", "same-run"])
WHY = "the same kernels on the same bits, which a checkpoint stores unchanged"


@contract("RESUME-1")
@world(4)
@needs(Capability.TENSOR_PARALLEL, Capability.TENSOR_PARALLEL_CHECKPOINT)
@REUSES
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_two_dimensions(rank: Rank, sequence: bool, optimizer: str, reuses: bool) -> None:
    """Model and optimizer, sharded over data- and tensor-parallel ranks, are restored bit for bit."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))

    def make(number: int) -> Run:
        torch.manual_seed(rank.seeds.init + number)
        model = SplitTransformer()
        return rank.run(
            model,
            units=model.units(),
            mesh=mesh["dp"],
            optimizer={"adam": optim.adam, "adamw": optim.adamw}[optimizer](),
            prepare=functools.partial(parallelize_transformer, mesh=mesh["tp"], sequence=sequence),
        )

    check_resumes(rank, make, reuses=reuses, mesh=mesh["dp"])


@contract("RESUME-2")
@world(4)
@REUSES
@pytest.mark.parametrize("hybrid", [False, pytest.param(True, marks=needs(Capability.HYBRID))])
def test_one_dimension_and_replicas(rank: Rank, hybrid: bool, reuses: bool) -> None:
    """The same on a one-dimensional mesh, and on replicas."""
    mesh = rank.mesh((2, 2), ("replicate", "shard")) if hybrid else rank.mesh()

    def make(number: int) -> Run:
        torch.manual_seed(rank.seeds.init + number)
        model = models.Transformer()
        return rank.run(model, units=model.units(), mesh=mesh, optimizer=optim.adamw())

    check_resumes(rank, make, reuses=reuses, mesh=mesh)


def check_resumes(rank: Rank, make: Any, *, reuses: bool, mesh: Any) -> None:
    """Three steps without interruption, and the same with a save and a load after the first."""

    def step(run: Run, number: int) -> Any:
        tokens = rank.tokens(number, (3, 8), vocabulary=11, mesh=mesh)
        return run.step([(tokens,)], loss=models.mean_square)

    through = make(0)
    expected = [step(through, number) for number in range(3)]
    saved = make(0)
    check_exact(rank, step(saved, 0), expected[0], step=0, why="the same seed, the same data")
    checkpoint = rank.tmp_path / "checkpoint"
    resume.save(saved, checkpoint)
    resumed = saved if reuses else make(1)
    if reuses:
        resume.spoil(resumed)
    wrong = step(resumed, 1)
    assert not torch.equal(wrong.losses[0], expected[1].losses[0]), "before loading the loss must be another"
    resume.load(resumed, checkpoint)
    for number in (1, 2):
        check_exact(rank, step(resumed, number), expected[number], step=number, why=WHY)
