"""Chapter DRAWN: models, meshes and schedules that nobody wrote down."""

from typing import Any

import pytest

from shardproof.testing import Capability, Rank, contract, deadline, drawn, needs, world
from shardproof.testing.make import Accumulation
from shardproof.testing.train import Block, Part, Plan, Step, Training, needs_of, train_drawn

WORLD = 2


@contract("DRAWN-1")
@world(2, 3, 4)
@deadline(10)  # of one example, which takes 0.3 s
@needs(Capability.ANY_COMBINATION)
@drawn(training=Training)
def test_any_training(rank: Rank, training: Training) -> None:
    """Any model, mesh, policies and schedule that the implementation claims train as plain copies do."""
    train_drawn(rank, training)


def found(name: str, training: Training) -> Any:
    """A training that a search found in a reference, as one value of a parameter."""
    return pytest.param(training, id=name, marks=needs(*needs_of(training, world_size=WORLD)))


INSIDE = Plan(Block((), (Block((), (Block((Part("tied"),), unit="own"),), recomputed="call"),), (Part(),)), dim=2)
FOUND = [
    found("gathered-by-a-call-after-an-evaluation", Training(steps=(Step(evaluates=("no_grad",), unshards=True),))),
    found("no-elements-in-a-unit", Training(plan=Plan(Block((Part("no-rows"), Part())), dim=3))),
    found(
        "unit-inside-of-what-is-recomputed",
        Training(plan=INSIDE, microbatches=2, steps=(Step(), Step()), accumulation=Accumulation()),
    ),
    found(
        "adam-beside-a-frozen-parameter",
        Training(plan=Plan(Block((Part(), Part("linear", frozen="first"))), dim=2), optimizer="adam"),
    ),
    found(
        "norm-below-the-clip",
        Training(plan=Plan(Block((Part(),), blocks=(Block((Part(),), calls=2),) * 4), dim=2), clip="2", seed=7),
    ),
]


@contract("DRAWN-1")
@world(WORLD)
@pytest.mark.parametrize("training", FOUND)
def test_trainings_found_by_search(rank: Rank, training: Training) -> None:
    """Trainings, shrunk, in which a reference or the harness once failed."""
    train_drawn(rank, training)
