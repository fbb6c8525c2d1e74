"""Compares two runs of one implementation bit for bit."""

from collections.abc import Iterator

import torch

from shardproof.harness.judging.elements import exact_difference
from shardproof.harness.judging.numerics import not_finite
from shardproof.harness.parity.divergences import Exact
from shardproof.harness.parity.rank_state import Member
from shardproof.harness.parity.run import StepPicture
from shardproof.harness.tensors.trees import local_of, on_host
from shardproof.harness.verdicts.finding import Finding, Location, Stage, raise_first


def check_exact(member: Member, first: StepPicture, second: StepPicture, *, step: int, why: str) -> None:
    """Check that losses, total norms, parameters and state of two runs are bitwise equal after a step (collective).

    The norm and the state are compared where both runs have them: one whose optimizers step in hooks has no state.
    ``why`` says for the message why the arithmetic is the same by construction.

    Raises:
        Divergence: on every rank, if any tensor differs on any rank; it names the first that differs, by stage and then
            by rank. Or if the pieces of either run do not cover the model.
    """

    def findings() -> Iterator[Finding]:
        for stage, name, one, other in _compared(first, second):
            difference = exact_difference(one, other)
            if difference:
                index, a, b = difference
                location = Location(stage=stage, step=step, rank=member.index, name=name, element=index)
                text = f"{a!r} and {b!r} (element of the local shard); expected equal bits: {why}"
                if (broken := not_finite({"the first run": one, "the second": other})) is not None:
                    text = f"{broken}: equal bits of such values would prove nothing"
                yield Finding(location, text)

    if member.explainer is not None:
        mine, other = on_host((first.captured, second.captured))
        member.explainer.add(Exact("another run of it", mine, other, findings, rank=member.index, step=step))
    pictures = (first, second)
    everyone = member.exchange((next(findings(), None), [picture.show(step=step) for picture in pictures]))
    raise_first([found for found, _ in everyone], title="two runs that should be equal differ")
    for number, picture in enumerate(pictures):
        assert picture.evidence is not None
        picture.evidence.judge([shown[number] for _, shown in everyone])


def _compared(first: StepPicture, second: StepPicture) -> Iterator[tuple[Stage, str, torch.Tensor, torch.Tensor]]:
    """The tensors to compare, in order: losses, the norm, the local shards of parameters, and of optimizer state."""
    for number, (one, other) in enumerate(zip(first.losses, second.losses, strict=True)):
        yield Stage.LOSS, f"microbatch {number}", one, other
    if first.norm is not None and second.norm is not None:
        yield Stage.TOTAL_NORM, "all gradients", local_of(first.norm), local_of(second.norm)
    assert first.parameters.keys() == second.parameters.keys()
    for name, piece in first.parameters.items():
        counterpart = second.parameters[name]
        assert piece is not None and counterpart is not None
        yield Stage.PARAMETER, name, piece.tensor, counterpart.tensor
    for name, state in (first.state or {}).items():
        others = (second.state or {}).get(name, {}) if second.state is not None else state
        assert state.keys() == others.keys(), f"the optimizer state of {name!r}: {sorted(state)} and {sorted(others)}"
        for key, piece in state.items():
            yield Stage.OPTIMIZER_STATE, f"{name}: {key}", piece.tensor, others[key].tensor
