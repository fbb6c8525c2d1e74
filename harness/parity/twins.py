"""Compares two runs of one implementation bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardproof.harness.findings.finding import Finding, Location
from shardproof.harness.findings.stages import Stage
from shardproof.harness.parity.comparison import exact_difference
from shardproof.harness.parity.member import Member
from shardproof.harness.parity.run import StepPicture


def check_exact(member: Member, first: StepPicture, second: StepPicture, *, step: int, why: str) -> None:
    """Check that two runs of one implementation have bitwise equal losses and parameters after a step (collective).

    Args:
        member: this rank.
        first: the step of one run.
        second: the same step of the other run.
        step: the number of the step, for the message.
        why: why the arithmetic is the same by construction, for the message.

    Raises:
        Divergence: on every rank, if any tensor differs on any rank. It names the first that differs, by stage and
            then by rank.
    """
    finding = None
    for stage, name, one, other in _compared(first, second):
        difference = exact_difference(one, other)
        if difference:
            index, a, b = difference
            location = Location(stage=stage, step=step, rank=member.index, name=name, element=index)
            finding = Finding(location, f"{a!r} and {b!r} (element of the local shard); expected equal bits: {why}")
            break
    member.agree(finding, title="two runs that should be equal differ")


def _compared(first: StepPicture, second: StepPicture) -> Iterator[tuple[Stage, str, torch.Tensor, torch.Tensor]]:
    """The tensors to compare, in order: each microbatch's loss, then each parameter's local shard."""
    for number, (one, other) in enumerate(zip(first.losses, second.losses, strict=True)):
        yield Stage.LOSS, f"microbatch {number}", one, other
    assert first.parameters.keys() == second.parameters.keys()
    for name, piece in first.parameters.items():
        counterpart = second.parameters[name]
        assert piece is not None and counterpart is not None
        yield Stage.PARAMETER, name, piece.tensor, counterpart.tensor
