"""Baselines beside those of a pair: one process with the batch of all ranks, and plain copies that a case averages."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardproof.harness.adapters.base import OptimizerFactory
from shardproof.harness.judging.elements import exact_difference
from shardproof.harness.models.plain import mean_square
from shardproof.harness.parity.comparison import Context, StepComparison
from shardproof.harness.parity.oracle import Oracle
from shardproof.harness.parity.rank_state import Member
from shardproof.harness.parity.replay import picture_of
from shardproof.harness.parity.run import Loss, Run, StepPicture
from shardproof.harness.tensors.pieces import Piece
from shardproof.harness.tensors.trees import on_host
from shardproof.harness.verdicts.finding import raise_first, step_label

# Plain copies of a model, whose gradients a case averages itself: a baseline of two models or several backwards.
#
# In a world of two, whose sums have one order, what they compute has the bits of a sharded run's.


def backward_of_copies(member: Member, *models: nn.Module, loss: torch.Tensor, retain_graph: bool = False) -> None:
    """Run backward of plain copies and add the averages over all ranks to their gradients (collective).

    A rank without a gradient contributes zeros; a parameter of which no rank has a gradient keeps what it has.
    """
    parameters = [value for model in models for value in model.parameters()]
    before = [value.grad for value in parameters]
    for value in parameters:
        value.grad = None
    loss.backward(retain_graph=retain_graph)
    everyone = member.exchange_tensors([value.grad for value in parameters])
    for value, earlier, *found in zip(parameters, before, *everyone, strict=True):
        present = [gradient for gradient in found if gradient is not None]
        average = functools.reduce(torch.add, present) / len(found) if present else None
        value.grad = earlier if average is None else average if earlier is None else earlier + average


def check_gradients(run: Run, model: nn.Module, *, step: int) -> None:
    """Check that the run's gradients have the bits of the averaged gradients of plain copies."""
    _check("gradient", run.adapter.gradients(), {n: p.grad for n, p in model.named_parameters()}, step)


def check_parameters(run: Run, model: nn.Module, *, step: int) -> None:
    """Check that the run's parameters have the bits of those of plain copies."""
    _check("parameter", dict(run.adapter.parameters()), {n: p.detach() for n, p in model.named_parameters()}, step)


def _check(
    kind: str, pieces: dict[str, Piece | None] | dict[str, Piece], plain: dict[str, torch.Tensor | None], step: int
) -> None:
    for name, piece in pieces.items():
        full, where = plain[name], f"{kind} of {name!r} in {step_label(step)}"
        if piece is None:
            # With flat parameters a rank has no gradient of what it holds no element of.
            continue
        assert full is not None, f"{where}: only the sharded run has one"
        difference = exact_difference(piece.tensor, piece.cut(full))
        assert difference is None, f"{where}: element, sharded and plain: {difference}"


class Undivided:
    """Trains a model without interruption in one process, in float32 and in float64.

    It takes the place of baseline and oracle where no baseline of several ranks goes on from one step to the next,
    because the ranks are others. The model, equal on all ranks, is copied; the optimizer, that of the runs, must not be
    adaptive.
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
            parts: the batch of each rank of the run, in the order of its ranks; equally many samples each.

        Raises:
            Divergence: on every rank, at the first stage where a run diverges.
        """
        step, self._steps = self._steps, self._steps + 1
        batches = [[(part,)] for part in parts]
        oracle, baseline = (one.step(batches, loss=loss) for one in (self._oracle, self._baseline))
        context = Context(
            step=step, rank=everyone.index, member=member.index, size=member.world_size,
            unused_is_zero=run.adapter.traits.unused_gradient != "none",
        )  # fmt: skip
        shown = member.exchange(picture.show(step=step))
        settled = run.settle(picture)
        comparison = StepComparison(settled, on_host(picture_of(baseline, member.index)), on_host(oracle), context)
        finding = comparison.first_finding()
        member.record.add_distances(comparison.measured)
        losses = {"sharded": settled.losses, "baseline": baseline.losses[member.index]}
        losses["oracle"] = oracle.losses[member.index]
        member.record.add_losses(**{who: sum(map(float, values)) for who, values in losses.items()})
        raise_first(everyone.exchange(finding), title="the run diverges from one process with the whole batch")
        run.evidence.judge(shown)
