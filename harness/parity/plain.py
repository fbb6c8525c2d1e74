"""Plain copies of a model, whose gradients a case averages itself: a baseline of two models or several backwards.

In a world of two, whose sums have one order, what they compute has the bits of a sharded run's.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from shardproof.harness.adapters.base import Piece
from shardproof.harness.parity.comparison import exact_difference
from shardproof.harness.parity.member import Member
from shardproof.harness.parity.run import Run
from shardproof.harness.verdicts.finding import step_label


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
    """Check that the run's gradients have the bits of the averaged gradients of plain copies.

    Raises:
        AssertionError: one differs, with its name, an element and both values.
    """
    _check("gradient", run.adapter.gradients(), {n: p.grad for n, p in model.named_parameters()}, step)


def check_parameters(run: Run, model: nn.Module, *, step: int) -> None:
    """Check that the run's parameters have the bits of those of plain copies.

    Raises:
        AssertionError: one differs, with its name, an element and both values.
    """
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
