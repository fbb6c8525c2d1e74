"""Chapter INPUTS: what a unit is given, whatever looks at it on the way."""

from __future__ import annotations

import pytest
import torch

from shardproof.harness import models
from shardproof.harness.models import passing
from shardproof.harness.parity import Rank
from shardproof.harness.parity.plain import backward_of_copies, check_gradients
from shardproof.harness.parity.refusals import error_of_all
from shardproof.testing import Capability, contract, each_value, needs, world


@contract("INPUTS-1")
@world(2)
@each_value("what")
@pytest.mark.parametrize("what", passing.FILLED)
def test_things_that_units_fill(rank: Rank, what: str) -> None:
    """What a script gives to units to be filled is filled, in training and in evaluation."""
    evaluate_and_train(rank, passing.Filling(9, what=what))


@contract("INPUTS-2")
@world(2)
@needs(Capability.CONTAINER_OUTPUT)
def test_things_that_are_no_tensors(rank: Rank) -> None:
    """What is no tensor reaches a unit and comes back as the same object, under whatever name it is passed."""
    evaluate_and_train(rank, passing.Handing(9))


@contract("INPUTS-3")
@world(2)
def test_tensors_that_need_no_gradient(rank: Rank) -> None:
    """A unit gets tensors that need no gradient without a copy, in their dtype and layout."""
    evaluate_and_train(rank, passing.Watching(9))


def evaluate_and_train(rank: Rank, model: models.Stacked) -> None:
    """Two evaluations and two steps of a model whose forward asserts what its units were given."""
    pair = rank.pair(model, units=model.units())
    for step in range(2):
        pair.evaluate(rank.batch(step, (2, 9), microbatch=1))
        pair.step(rank.batch(step, (2, 9)))
        pair.check()


@contract("INPUTS-4")
@world(2)
@pytest.mark.parametrize("uses_again", [False, True])
def test_input_changed_in_place(rank: Rank, uses_again: bool) -> None:
    """Units that change their input in place have the plain gradients, or every rank raises."""
    model = passing.Overwriting(9, uses_again=uses_again)
    plain = models.copy_of(model).to(rank.device)
    run = rank.run(model, units=model.units())
    x = rank.batch(0, (4, 9))
    backward_of_copies(rank, plain, loss=models.mean_square(plain(x)))

    def attempt() -> None:
        with run.recorder.during("forward"):
            output = run.adapter.forward(x)
        with run.recorder.during("backward"):
            models.mean_square(output).backward()

    if not error_of_all(rank, attempt):
        check_gradients(run, plain, step=0)


@contract("INPUTS-5")
@world(2, 4)
def test_batch_without_rows(rank: Rank) -> None:
    """A rank whose batch has no row takes part, and its gradients count as zeros."""
    model = models.Tower(dim=9)
    pair = rank.pair(model, units=model.units())
    for step in range(3):
        rows = 0 if rank.index == step % rank.world_size else 3
        pair.step(rank.batch(step, (rows, 9)), loss=torch.sum)
        pair.check()
