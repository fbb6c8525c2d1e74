"""Chapter EVALUATION: forwards without a backward, between training steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.adapters.base import Adapter
from shardproof.harness.findings.finding import step_label
from shardproof.harness.parity import Rank
from shardproof.harness.plugin.axes import RESHARD

MODES = ["no_grad", "inference_mode"]

DEPTH = 3


@contract("EVALUATION-1")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_between_steps(rank: Rank, mode: Any, reshard_after_forward: bool | int | None) -> None:
    """Evaluations give the baseline's output for the parameters of now, and change no training step.

    Without gradients they are also the first use of the model.
    """
    model = models.Tower(dim=9, depth=DEPTH)
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    for step in range(3):
        for number in (1, 2):
            pair.evaluate(rank.batch(step, (2, 9), microbatch=number), mode=mode if step else "no_grad")
        pair.step(rank.batch(step, (4, 9)))
        pair.check()


@contract("EVALUATION-1")
@world(2)
def test_first_forward_is_in_inference_mode(rank: Rank) -> None:
    """A model whose first forward ran in inference mode trains as any other."""
    model = models.Tower(dim=9, depth=DEPTH)
    pair = rank.pair(model, units=model.units())
    pair.evaluate(rank.batch(0, (2, 9), microbatch=1), mode="inference_mode")
    for step in range(2):
        pair.step(rank.batch(step, (4, 9)))
        pair.check()


@contract("EVALUATION-2")
@world(2, 4)
@needs(Capability.REGISTERED_STATE, Capability.ROOT_RESHARD)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_frees_what_forward_frees(rank: Rank, mode: Any, reshard_after_forward: bool | int | None) -> None:
    """After an evaluation parameters are gathered exactly if they are gathered after a training forward."""
    model = models.Tower(dim=9, depth=DEPTH)
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    keeps = {True: reshard_after_forward in (None, False), False: reshard_after_forward is False}
    for step in range(2):
        pair.evaluate(rank.batch(step, (2, 9), microbatch=1), mode=mode if step else "no_grad")
        for name, gathered in pair.adapter.gathered().items():
            expected = keeps[not name.startswith("layers.")]
            assert gathered == expected, (
                f"{name}: gathered is {gathered} after the evaluation before {step_label(step)} with "
                f"reshard_after_forward={reshard_after_forward!r}"
            )
        pair.step(rank.batch(step, (4, 9)))
        pair.check()


@contract("EVALUATION-2")
@world(2, 4)
@needs(Capability.COUNTED_UNITS, Capability.ROOT_RESHARD, Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("mode", MODES)
def test_values_of_an_evaluation_do_not_outlive_the_step(rank: Rank, mode: Any) -> None:
    """An evaluation between backward and the optimizer's step leaves no gathered values for the forward after it."""
    model = models.Tower(dim=9, depth=DEPTH)
    batch = rank.batch(0, (2, 9), microbatch=1)

    def evaluate(adapter: Adapter) -> None:
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            adapter.forward(batch)

    pair = rank.pair(model, units=model.units(), reshard_after_forward=True, after_backward=evaluate)
    for step in range(3):
        pair.step(rank.batch(step, (4, 9)))
        pair.check()
        pair.check_counts("forward", all_gather=DEPTH + 1)
        pair.check_counts("backward", all_gather=DEPTH + 1, reduce_scatter=DEPTH + 1)


@contract("EVALUATION-2")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_second_evaluation_sees_the_step(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Of two evaluations, one between backward and the optimizer's step and one after it, the second sees the step.

    What stays gathered after the first, by default the root's own unit, has the values of before.
    """
    model = models.Tower(dim=9, depth=DEPTH)
    batch = rank.batch(0, (2, 9), microbatch=1)

    def evaluate(adapter: Adapter) -> None:
        with torch.no_grad():
            adapter.forward(batch)

    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward, after_backward=evaluate)
    for step in range(3):
        if step:
            pair.evaluate(batch)
        pair.step(rank.batch(step, (4, 9)))
        pair.check()


@contract("EVALUATION-2")
@world(2)
@needs(Capability.COUNTED_UNITS)
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_gathers_each_unit_once(rank: Rank, mode: Any) -> None:
    """An evaluation gathers each unit once, and the training step after it gathers again what reshards by default."""
    model = models.Tower(dim=9, depth=DEPTH)
    pair = rank.pair(model, units=model.units())
    for step in range(2):
        before = len(pair.sharded.trace)
        pair.evaluate(rank.batch(step, (2, 9), microbatch=1), mode=mode if step else "no_grad")
        gathered = [item.unit for item in pair.sharded.trace[before:]]
        expected = ["(root)", *(f"layers.{index}" for index in range(DEPTH))]
        assert sorted(gathered) == expected, f"the evaluation before {step_label(step)} gathers {gathered}"
        pair.step(rank.batch(step, (4, 9)))
        pair.check()
        in_forward = {item.unit for item in pair.last_trace() if item.phase == "forward"}
        missing = set(expected[1:]) - in_forward
        assert not missing, f"{step_label(step)} uses what the evaluation gathered of {', '.join(sorted(missing))}"
        pair.check_counts("backward", all_gather=DEPTH, reduce_scatter=DEPTH + 1)
