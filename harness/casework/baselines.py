"""The training of one process on the whole batch of all ranks, with which runs of any number of ranks are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardproof.harness.adapters.base import OptimizerFactory, whole
from shardproof.harness.models.plain import mean_square
from shardproof.harness.parity.comparison import Context, StepComparison
from shardproof.harness.parity.member import Member
from shardproof.harness.parity.oracle import Oracle, OracleStep
from shardproof.harness.parity.run import Loss, Run, StepPicture
from shardproof.harness.tensors.host import on_host
from shardproof.harness.tensors.trees import tensors_of
from shardproof.harness.verdicts.finding import raise_first


class Undivided:
    """Trains a model without interruption in one process, in float32 and in float64.

    It takes the place of baseline and oracle where no baseline of several ranks goes on from one step to the next,
    because the ranks are others.

    Args:
        model: equal on all ranks; it is copied.
        optimizer: of the runs that are compared; not an adaptive one.
    """

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory) -> None:
        self._oracle = Oracle(model, optimizer=optimizer, clip=None)
        self._baseline = Oracle(model, optimizer=optimizer, clip=None, dtype=torch.float32)
        self._steps = 0

    def check(
        self, everyone: Member, member: Member, run: Run, picture: StepPicture, parts: Sequence[Any],
        *, loss: Loss = mean_square,
    ) -> None:  # fmt: skip
        """Train the next step, and compare that of a run with it (collective).

        Args:
            everyone: this rank of the world of the case: all its ranks fail together.
            member: this rank of the world of the run.
            run: the run.
            picture: its step.
            parts: the batch of each rank of the run, in the order of its ranks; equally many samples each.
            loss: the loss of the step.

        Raises:
            Divergence: on every rank, at the first stage where a run diverges.
        """
        step, self._steps = self._steps, self._steps + 1
        batches = [[(part,)] for part in parts]
        oracle, baseline = (one.step(batches, loss=loss) for one in (self._oracle, self._baseline))
        context = Context(
            step=step, rank=everyone.index, member=member.index, size=member.world_size,
            unused_is_zero=run.adapter.traits.unused_gradient == "zero",
        )  # fmt: skip
        shown = member.exchange(picture.show(step=step))
        settled = run.settle(picture)
        comparison = StepComparison(settled, on_host(_picture(baseline, member.index)), on_host(oracle), context)
        finding = comparison.first_finding()
        member.record.add_distances(comparison.measured)
        losses = {"sharded": settled.losses, "baseline": baseline.losses[member.index]}
        losses["oracle"] = oracle.losses[member.index]
        member.record.add_losses(**{who: sum(map(float, values)) for who, values in losses.items()})
        raise_first(everyone.exchange(finding), title="the run diverges from one process with the whole batch")
        run.evidence.judge(shown)


def _picture(step: OracleStep, index: int) -> StepPicture:
    """What a rank has of a step of one process."""
    return StepPicture(
        outputs=[[*tensors_of(output)] for output in step.outputs[index]],
        losses=step.losses[index],
        gradients={name: None if value is None else whole(value) for name, value in step.gradients.items()},
        norm=None,
        clipped=None,
        parameters={name: whole(value) for name, value in step.parameters.items()},
        state={name: {key: whole(one) for key, one in state.items()} for name, state in step.state.items()},
    )
