"""What a run is compared with besides the baseline of a pair: another run, plain copies, one process.

A case averages the gradients of plain copies itself: a baseline of two models or of several backwards. In a world of
two, whose sums have one order, what they compute has the bits of a sharded run's.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import torch
from torch import nn

from shardproof.harness.adapters.base import OptimizerFactory
from shardproof.harness.judging.elements import exact_difference, numbers_of
from shardproof.harness.judging.finding import Finding, Location, Stage, raise_first, step_label
from shardproof.harness.judging.numerics import distance, not_finite
from shardproof.harness.models.plain import mean_square
from shardproof.harness.parity.comparison import Context, StepComparison
from shardproof.harness.parity.divergences import Exact
from shardproof.harness.parity.oracle import Oracle
from shardproof.harness.parity.rank_state import Member
from shardproof.harness.parity.replay import picture_of
from shardproof.harness.parity.run import Loss, Run, StepPicture
from shardproof.harness.tensors.pieces import Piece, original_name, piece_of, uncut
from shardproof.harness.tensors.trees import full_of, local_of, map_leaves, map_tensors, on_host, tensors_of

__all__ = [
    "Finding",
    "Location",
    "Oracle",
    "Piece",
    "Stage",
    "StepPicture",
    "Undivided",
    "backward_of_copies",
    "check_bits",
    "check_exact",
    "check_gradients",
    "check_parameters",
    "distance",
    "each_once",
    "exact_difference",
    "full_of",
    "in_one_tensor_with",
    "local_of",
    "map_leaves",
    "map_tensors",
    "numbers_of",
    "original_name",
    "piece_of",
    "step_label",
    "tensors_of",
    "uncut",
]


_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def check_bits(what: str, found: torch.Tensor, expected: torch.Tensor, *, sides: str = "found and expected") -> None:
    """Check that two tensors of one shape are equal, as :func:`exact_difference` has it."""
    difference = exact_difference(found, expected)
    assert difference is None, f"{what}: element, {sides}: {difference}"


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
        assert picture.coverage is not None
        picture.coverage.judge([shown[number] for _, shown in everyone])


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
        run.coverage.judge(shown)


def each_once(named: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
    """Return tensors by name, each under the first of its names.

    A flat chunk that has several parameters is the tensor of all their names. Whatever changes parameters one after the
    other goes through this, or it changes such a chunk once for each of its parameters.
    """
    found: dict[int, str] = {}
    for name, tensor in named.items():
        found.setdefault(id(tensor), name)
    return {name: named[name] for name in found.values()}


def in_one_tensor_with(names: Set[str], named: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of all parameters that lie in one tensor with one of these, and so change together with it."""
    tensors = {id(tensor) for name, tensor in named.items() if name in names}
    return {name for name, tensor in named.items() if id(tensor) in tensors}
