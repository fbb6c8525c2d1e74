"""Chapter DETERMINISM: the same run gives the same bits."""

from __future__ import annotations

import copy

import pytest
import torch

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.findings.finding import Finding, Location, step_label
from shardproof.harness.findings.stages import Stage
from shardproof.harness.models import optim
from shardproof.harness.parity import Rank, check_exact, exact_difference
from shardproof.harness.parity.run import StepPicture
from shardproof.harness.plugin.axes import KEEPS

WHY = "the same implementation, seeds and data, and deterministic algorithms"


@contract("DETERMINISM-1")
@world(2, 4)
@KEEPS
def test_two_runs(rank: Rank, reshard_after_forward: bool | None) -> None:
    """Two runs in one process, with the same seeds and data, have the same bits in every step."""
    model = models.Transformer()
    runs = [
        rank.run(
            copy.deepcopy(model),
            units=model.units(),
            optimizer=optim.adamw(),
            reshard_after_forward=reshard_after_forward,
        )
        for _ in range(2)
    ]
    for step in range(3):
        tokens = rank.tokens(step, (3, 8), vocabulary=11)
        pictures = [run.step([(tokens,)], loss=models.mean_square) for run in runs]
        check_exact(rank, *pictures, step=step, why=WHY)


@contract("DETERMINISM-1")
@world(4)
@needs(Capability.HYBRID)
@pytest.mark.parametrize(
    "shape", [(2, 2), pytest.param((4, 1), marks=needs(Capability.SINGLE_RANK))], ids=["2x2", "4x1"]
)
def test_replicas(rank: Rank, shape: tuple[int, int]) -> None:
    """Replicas have the same bits after every step; what differs by a rounding would drift apart unnoticed."""
    mesh = rank.mesh(shape, ("replicate", "shard"))
    model = models.Transformer()
    run = rank.run(model, units=model.units(), mesh=mesh, optimizer=optim.sgd())
    first = int(mesh.mesh[0, mesh.get_local_rank("shard")])
    for step in range(3):
        tokens = rank.tokens(step, (3, 8), vocabulary=11)
        picture = run.settle(run.step([(tokens,)], loss=models.mean_square))
        mine = tensors_of_step(picture)
        expected = rank.exchange(mine)[first]
        finding = None
        for (stage, name), tensor in mine.items():
            difference = exact_difference(tensor, expected[stage, name])
            if difference is not None and finding is None:
                index, here, there = difference
                text = f"is {here!r} here and {there!r} on rank {first}, which holds the same share"
                place = Location(stage=stage, step=step, rank=rank.index, name=name, element=index)
                finding = Finding(place, text)
        rank.agree(finding, title=f"replicas have different bits after {step_label(step)}")


def tensors_of_step(picture: StepPicture) -> dict[tuple[Stage, str], torch.Tensor]:
    """This rank's shares of the gradients, the parameters and the optimizer's state."""
    found = {(Stage.GRADIENT, name): piece for name, piece in picture.gradients.items()}
    found |= {(Stage.PARAMETER, name): piece for name, piece in picture.parameters.items()}
    for name, state in (picture.state or {}).items():
        found |= {(Stage.OPTIMIZER_STATE, f"{name}: {key}"): piece for key, piece in state.items()}
    return {place: piece.tensor for place, piece in found.items() if piece is not None}
