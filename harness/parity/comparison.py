"""Compares one step of the sharded run, the baseline and the oracle, and finds the first stage that diverges."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from shardproof.harness.adapters.base import Piece, whole
from shardproof.harness.judging.numerics import ADAM_NOISE_ULPS, Distance, distance, not_finite, ulp
from shardproof.harness.parity.oracle import OracleStep, total_norm
from shardproof.harness.parity.protocol import cut
from shardproof.harness.parity.run import Pieces, StepPicture
from shardproof.harness.tensors.trees import tensors_of
from shardproof.harness.verdicts.finding import Finding, Guess, Location, Numbers, Stage
from shardproof.harness.verdicts.observations import Measured

#: Largest error of the baseline, in ulps, at which it still counts as a reference. Above it the case is
#: ill-conditioned, and the comparison raises an error instead of accepting a correspondingly large error.
BASELINE_LIMIT_ULPS = 4096.0

#: What is wrong with a pair of a model such as one with dropout.
_DRAWS = (
    "the model or the loss draws random numbers, other ones in each run: leave dropout out (p=0), or compare two runs "
    "that start from one seed with check_exact"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """Parameters that all comparisons of one step share.

    Attributes:
        step: the training step, counted from 0.
        member: this rank's position among the data-parallel ranks, from 0 to ``size`` - 1.
        unused_is_zero: whether the implementation gives a parameter that no rank used a gradient of zeros, not None.
        adaptive: whether the optimizer is adaptive (not SGD), so that elements whose gradient is rounding noise are
            left out of the comparison of parameters.
        evaluates: whether this is a forward without autograd before the step, and not the step.
        untied: why the values of a parameter may differ whose places the model shares and the sharded one does not, by
            its name.
    """

    step: int
    rank: int
    member: int
    size: int
    norm_type: float = 2.0
    unused_is_zero: bool = False
    adaptive: bool = False
    evaluates: bool = False
    frozen: frozenset[str] = frozenset()
    draws_random_numbers: bool = False
    untied: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class StepComparison:
    """Compares one step of the sharded run with the same step of the baseline and of the oracle, on one rank.

    Attributes:
        sharded: the sharded run's step, as local shards; all tensors of the three are on the host.
        baseline: the baseline's step, as full tensors.
        oracle: the oracle's step, as full float64 tensors.
        measured: the distances measured so far, one entry per compared tensor, in order of comparison.
    """

    sharded: StepPicture
    baseline: StepPicture
    oracle: OracleStep
    context: Context
    measured: list[Measured] = dataclasses.field(default_factory=list)

    def first_finding(self) -> Finding | None:
        """Return the first finding, in order of stages; a RuntimeError says that the baseline itself is too far off."""
        forwards = (found for number in range(len(self.sharded.outputs)) for found in self.of_microbatch(number))
        return next(itertools.chain(forwards, self.after_backward()), None)

    def of_microbatch(self, number: int) -> Iterator[Finding]:
        """Compare the output and the loss of one microbatch."""
        member, outputs = self.context.member, self.sharded.outputs[number]
        expected = [*tensors_of(self.oracle.outputs[member][number])]
        for index, triple in enumerate(zip(outputs, self.baseline.outputs[number], expected, strict=True)):
            if triple[0].is_floating_point():
                where = "evaluation" if self.context.evaluates else f"microbatch {number}"
                yield from self._scalar_or_tensor(Stage.OUTPUT, f"{where}, tensor {index}", *triple)
        if not self.context.evaluates:
            loss = self.sharded.losses[number], self.baseline.losses[number], self.oracle.losses[member][number]
            yield from self._scalar_or_tensor(Stage.LOSS, f"microbatch {number}", *loss)

    def after_backward(self) -> Iterator[Finding]:
        """Compare what follows the last backward of the step; nothing follows an evaluation."""
        if self.context.evaluates:
            return
        yield from self._pieces(Stage.GRADIENT, self.sharded.gradients, self.baseline.gradients, self.oracle.gradients)
        yield from self._norm()
        if self.sharded.clipped is not None and self.baseline.clipped is not None:
            yield from self._pieces(
                Stage.CLIPPED_GRADIENT, self.sharded.clipped, self.baseline.clipped, self.oracle.clipped
            )
        yield from self._pieces(
            Stage.PARAMETER, self.sharded.parameters, self.baseline.parameters, self.oracle.parameters
        )
        yield from self._states()

    def _states(self) -> Iterator[Finding]:
        """Compare the optimizer state of every parameter of which this rank holds anything."""
        mine, reference = self.sharded.state, self.baseline.state
        if mine is None or reference is None:
            return
        for name in sorted(self.oracle.state.keys() & mine.keys()):
            full = self.oracle.state[name]
            if self._holds_nothing(name) and not mine[name]:
                continue
            found = mine[name]
            if not full and self.context.unused_is_zero and not any(one.tensor.any() for one in found.values()):
                continue  # what a gradient of zeros leaves
            if found.keys() != full.keys():
                text = f"has the state {sorted(found) or 'nothing'}; the baseline's is {sorted(full) or 'nothing'}"
                yield self._finding(Stage.OPTIMIZER_STATE, name, None, text)
                continue
            for key, piece in found.items():
                other = reference[name][key].tensor
                yield from self._judge(Stage.OPTIMIZER_STATE, f"{name}: {key}", piece, other, full[key])

    def _holds_nothing(self, name: str) -> bool:
        """Whether this rank holds no element of a parameter, so that it may have no gradient and no state of it."""
        piece = self.sharded.parameters.get(name)
        return piece is not None and piece.tensor.numel() == 0

    def _norm(self) -> Iterator[Finding]:
        sharded, baseline, oracle = self.sharded.norm, self.baseline.norm, self.oracle.norm
        if sharded is None or baseline is None or oracle is None:
            return
        held = [piece.tensor for piece in self.sharded.gradients.values() if piece is not None]
        p = self.context.norm_type
        local = float(total_norm(held, p))
        for finding in self._scalar_or_tensor(Stage.TOTAL_NORM, f"the {p:g}-norm", sharded, baseline, oracle):
            why = guess_norm(float(sharded), float(oracle), local, self.context.size, p)
            yield dataclasses.replace(finding, guess=why or finding.guess)

    def _scalar_or_tensor(
        self, stage: Stage, name: str, sharded: torch.Tensor, baseline: torch.Tensor, oracle: torch.Tensor
    ) -> Iterator[Finding]:
        if sharded.shape != oracle.shape:
            yield self._finding(stage, name, None, f"has shape {tuple(sharded.shape)}, not {tuple(oracle.shape)}")
            return
        yield from self._judge(stage, name, whole(sharded), baseline, oracle)

    def _pieces(
        self, stage: Stage, sharded: Pieces, baseline: Pieces, oracle: Mapping[str, torch.Tensor | None]
    ) -> Iterator[Finding]:
        if not sharded and not self.sharded.parameters:
            return  # a run without pictures
        if sharded.keys() != oracle.keys():
            missing, extra = sorted(oracle.keys() - sharded.keys()), sorted(sharded.keys() - oracle.keys())
            yield self._finding(stage, "", None, f"parameters missing: {missing or 'none'}; unknown: {extra or 'none'}")
            return
        for name in sharded:
            mine, full, reference = sharded[name], oracle[name], baseline[name]
            if mine is None or full is None or reference is None:
                yield from self._absent(stage, name, mine, reference, full)
            else:
                yield from self._judge(stage, name, mine, reference.tensor, full)

    def _absent(
        self, stage: Stage, name: str, mine: Piece | None, reference: Piece | None, full: torch.Tensor | None
    ) -> Iterator[Finding]:
        """Compare which of the three runs have a gradient, where one of them has none."""
        if mine is None and self._holds_nothing(name):
            return
        guess = None
        if full is None:
            if mine is None or (self.context.unused_is_zero and not bool(mine.tensor.any())):
                return
            if not bool(mine.tensor.any()):
                declared = "which an adapter declares with the trait unused_gradient='zero'"
                guess = Guess("it is zero", f"zeros stand for a missing gradient, {declared}")
            is_frozen = name in self.context.frozen
            why = "the parameter is frozen (requires_grad=False)" if is_frozen else "no rank used the parameter"
            text = f"the sharded run has a gradient, but {why}"
            text += "" if reference is None else " (the baseline has one too, the oracle has none)"
        elif mine is not None:
            text = "the baseline has no gradient; the sharded run and the oracle have one"
        elif reference is not None:
            text = "the sharded run has no gradient; the baseline has one"
            if self.context.unused_is_zero and not bool(full.any()):
                text += " of zeros, as the trait unused_gradient='zero' of the adapter declares"
        else:
            text = "the sharded run and the baseline have no gradient; the oracle has one"
        yield self._finding(stage, name, None, text, guess)

    def _judge(
        self, stage: Stage, name: str, mine: Piece, baseline: torch.Tensor, oracle: torch.Tensor
    ) -> Iterator[Finding]:
        expected = cut(mine, oracle, name)
        if mine.tensor.shape != expected.shape:
            share = f"this rank's share of {tuple(oracle.shape)} is {tuple(expected.shape)}"
            yield self._finding(stage, name, None, f"the local shard has shape {tuple(mine.tensor.shape)}; {share}")
            return
        if mine.tensor.dtype != baseline.dtype:
            yield self._finding(stage, name, None, f"has dtype {mine.tensor.dtype}; the baseline has {baseline.dtype}")
            return
        runs = {"the sharded run": mine.tensor, "the baseline": baseline, "the oracle": oracle}
        if (text := not_finite(runs)) is not None:
            found = (~mine.tensor.isfinite()).flatten().nonzero()
            element = _global_index(mine, oracle, int(found[0])) if len(found) else None
            if not bool(oracle.isfinite().all()):
                text += "\n  the model, its data or the loss makes it, sharded or not: such values prove nothing"
            yield self._finding(stage, name, element, text)
            return
        # The maximum of the full tensor, not of the local shard: every rank measures with the same ulp.
        magnitude = float(oracle.abs().max()) if oracle.numel() else 0.0
        value, other = mine.tensor.detach(), cut(mine, baseline.detach(), name)
        if stage == Stage.PARAMETER and self.context.adaptive:
            value, other, expected = self._without_noise(name, mine, value, other, expected)
        result = distance(value, other, expected, magnitude=magnitude)
        self.measured.append(
            Measured(stage, self.context.step, name, result.sharded_ulps, result.baseline_ulps, result.allowed_ulps)
        )
        if result.baseline_ulps > BASELINE_LIMIT_ULPS:
            raise RuntimeError(
                f"{stage.value} of {name!r}: the baseline itself is {result.baseline_ulps:.3g} ulps from the oracle, "
                f"more than {BASELINE_LIMIT_ULPS:g}; the case is too ill-conditioned to judge the sharded run"
                + (f": {_DRAWS}" if self.context.draws_random_numbers else "")
            )
        if result.is_too_far:
            element = _global_index(mine, oracle, result.index)
            text, numbers = numbers_of(result, {"sharded": value, "baseline": other, "oracle": expected})
            guess = self._guess(stage, name, mine, value, expected)
            guess = guess or guess_from_values(value, expected, magnitude=magnitude)
            yield dataclasses.replace(self._finding(stage, name, element, text, guess), numbers=numbers)

    def _without_noise(self, name: str, mine: Piece, *values: torch.Tensor) -> list[torch.Tensor]:
        """Set the elements of ``values`` whose gradient is rounding noise to zero.

        Adam moves an element by about the learning rate whatever the size of its gradient, so an element whose gradient
        is only rounding error moves in an arbitrary direction. An element is noise if the oracle's gradient is at most
        ``ADAM_NOISE_ULPS`` ulps, in the parameter's dtype at the largest magnitude of the oracle's full gradient.
        """
        gradient = self.oracle.gradients[name]
        if gradient is None or not gradient.numel():
            return list(values)  # nothing has moved, or there is nothing that could
        floor = ADAM_NOISE_ULPS * ulp(float(gradient.abs().max()), mine.tensor.dtype)
        significant = mine.cut(gradient).abs() > floor
        return [torch.where(significant, value, torch.zeros_like(value)) for value in values]

    def _guess(self, stage: Stage, name: str, mine: Piece, value: torch.Tensor, expected: torch.Tensor) -> Guess | None:
        before = self.sharded.gradients.get(name)
        if stage == Stage.CLIPPED_GRADIENT and before is not None:
            is_equal = value.shape == before.tensor.shape and torch.equal(value, before.tensor)
            return Guess("it equals the gradient before clipping: clipping did nothing to it") if is_equal else None
        if stage != Stage.GRADIENT:
            return None
        full = [one[name] for one in self.oracle.own_gradients]
        own = [None if gradient is None else mine.cut(gradient) for gradient in full]
        return guess_gradient(value, expected, own, self.context.member)

    def _finding(
        self, stage: Stage, name: str, element: tuple[int, ...] | None, text: str, guess: Guess | None = None
    ) -> Finding:
        location = Location(stage=stage, step=self.context.step, rank=self.context.rank, name=name, element=element)
        lines = [text, *filter(None, [self.context.untied.get(name.partition(":")[0])])]
        if self.context.draws_random_numbers:
            lines.append(_DRAWS)
        return Finding(location, "\n  ".join(lines), guess)


def numbers_of(result: Distance, runs: Mapping[str, torch.Tensor]) -> tuple[str, Numbers]:
    """Describe in two lines, and in numbers, the element in which the sharded run is farthest from the oracle.

    ``runs`` has the tensor by the name of a run, in one shape.
    """
    values = {who: float(tensor.flatten()[result.index]) for who, tensor in runs.items()}
    text = (
        f"{', '.join(f'{who} {value:.9g}' for who, value in values.items())}\n  off by "
        f"{_number(result.sharded_ulps)} ulps (1 ulp is {result.unit:.3g}); the baseline is "
        f"off by {_number(result.baseline_ulps)} ulps, so at most {_number(result.allowed_ulps)} ulps are allowed"
    )
    ulps = {"sharded": result.sharded_ulps, "baseline": result.baseline_ulps, "allowed": result.allowed_ulps}
    return text, Numbers(result.index, values, ulps)


def _global_index(piece: Piece, full: torch.Tensor, index: int) -> tuple[int, ...]:
    """The index into the full tensor of the local shard's element ``index``.

    The layout of a shard is known only as the function ``piece.cut``, so a full tensor of positions is cut the same
    way, and the position is read at ``index``.
    """
    positions = torch.arange(full.numel(), device=full.device).view(full.shape)
    position = int(piece.cut(positions).flatten()[index])
    return tuple(int(part) for part in torch.unravel_index(torch.tensor(position), full.shape))


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "infinitely many"


def exact_difference(first: torch.Tensor, second: torch.Tensor) -> tuple[tuple[int, ...], float, float] | None:
    """The index and the values of the first element in which two tensors of one shape differ, or None.

    NaN differs from everything, NaN too. Equal infinities do not differ, nor do 0.0 and -0.0.
    """
    assert first.shape == second.shape, f"shapes {tuple(first.shape)} and {tuple(second.shape)} differ"
    if torch.equal(first, second):
        return None
    index = tuple(int(part) for part in (first != second).nonzero()[0])
    return index, float(first[index]), float(second[index])


# Guesses why a tensor is wrong, by comparing it with what common bugs produce. A guess never decides a verdict.
#
# Tensors of the sharded run are this rank's local shards, of any shape, and those of the oracle have the same elements.
# A function returns None if no cause that it knows fits.

#: Relative difference up to which a wrong tensor counts as equal to what a suspected bug produces. It affects the
#: text of a failure only, never the verdict.
_LIKENESS = 1e-3

#: The dtypes to which a wider tensor may have been rounded on its way, coarsest first, with their names in messages.
_NARROW = ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"))

#: Elements other than zero from which it is no accident that all of them have one factor, or fit a narrower dtype.
_ENOUGH = 4

#: An error of rounding to a dtype is at most half an ulp. The largest of many is seldom below a quarter, and a sum of a
#: few rounded values has a few times the error of one.
_ROUNDING_ULPS = (0.25, 4.0)


def guess_gradient(
    sharded: torch.Tensor, oracle: torch.Tensor, own: Sequence[torch.Tensor | None], rank: int
) -> Guess | None:
    """Guess the cause of a wrong gradient.

    Args:
        oracle: the same shard of the oracle's gradient, the average over ``len(own)`` ranks.
        own: the same shard of each rank's gradient before the average; None for a rank without a gradient.
        rank: this rank's position in ``own``.
    """
    if sharded.numel() and not bool(sharded.any()):
        return Guess("it is zero")
    return next(_guesses(sharded, oracle, own, rank), None)


def _guesses(
    sharded: torch.Tensor, oracle: torch.Tensor, own: Sequence[torch.Tensor | None], rank: int
) -> Iterator[Guess]:
    size = len(own)
    for factor, cause in _factors(size):
        if _alike(sharded, oracle * factor):
            yield Guess(f"it is {factor:.4g} times the oracle's everywhere", cause)
    for index, gradient in enumerate(own):
        for factor, change in ((1.0, ""), (1.0 / size, f" divided by {size}")):
            if gradient is not None and _alike(sharded, gradient * factor):
                whose = "this rank's own gradient" if index == rank else f"the gradient of rank {index} alone"
                yield Guess(f"it equals {whose}{change}", "the reduction over the ranks is missing")
    for index, gradient in enumerate(own):
        for sign, times in ((1, "twice"), (-1, "not at all")):
            if gradient is not None and size > 1 and _alike(sharded, oracle + sign * gradient / size):
                yield Guess(f"it is the average in which the gradient of rank {index} counts {times}")


def guess_from_values(sharded: torch.Tensor, oracle: torch.Tensor, *, magnitude: float) -> Guess | None:
    """Guess from a tensor's values alone: it was rounded to a narrower dtype, or scaled.

    ``magnitude`` is the largest absolute value of the oracle's full tensor.
    """
    return next(_guesses_from_values(sharded, oracle, magnitude), None)


def _guesses_from_values(sharded: torch.Tensor, oracle: torch.Tensor, magnitude: float) -> Iterator[Guess]:
    is_wide = sharded.dtype in (torch.float32, torch.float64)
    has_enough = int(oracle.count_nonzero()) >= _ENOUGH
    for dtype, name in _NARROW if is_wide else ():
        if _is_rounded(sharded, oracle, dtype):
            yield Guess(f"it equals the expected value rounded to {name}")
        if has_enough and _is_rounded(sharded, sharded, dtype) and not _is_rounded(oracle, oracle, dtype):
            yield Guess(f"all of its elements are {name} numbers, as when it was rounded to {name} on its way")
    factor = _common_factor(sharded, oracle) if has_enough else None
    if factor is not None:
        yield Guess(f"it is {factor:.4g} times the oracle's everywhere")
    errors = sharded.double() - oracle.double()
    if is_wide and has_enough and _is_noise(errors):
        for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16 or TF32")):
            low, high = _ROUNDING_ULPS
            if low <= float(errors.abs().max()) / ulp(magnitude, dtype) <= high:
                yield Guess(f"its errors are as large as rounding to {name} makes")


def _is_rounded(value: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(value.double(), exact.to(dtype).double())


def _is_noise(errors: torch.Tensor) -> bool:
    """Whether errors are spread over the elements and have both signs, as those of rounding are."""
    is_spread = float(errors.abs().median()) > float(errors.abs().max()) / 64
    return is_spread and bool((errors > 0).any()) and bool((errors < 0).any())


def guess_norm(sharded: float, oracle: float, local: float, size: int, norm_type: float) -> Guess | None:
    """Guess the cause of a wrong total norm; ``local`` is the norm over this rank's local shards alone."""
    if _near(sharded, local):
        return Guess("it equals the norm of what this rank alone holds", "its reduction over the ranks is missing")
    if norm_type != float("inf") and _near(sharded, oracle * size ** (1 / norm_type)):
        seen = f"it is the oracle's times {size}^(1/{norm_type:g})"
        return Guess(seen, "replicated parts are counted on every rank")
    return None


def _factors(size: int) -> list[tuple[float, str]]:
    """The factors by which mistakes in averaging over ``size`` ranks scale a gradient, with the mistake."""
    if size == 1:
        return []
    return [
        (float(size), f"the division by the {size} ranks is missing or an average is a sum"),
        (1.0 / size, f"the average over the {size} ranks is divided twice"),
        (float(size) ** 2, "a sum is multiplied instead of divided"),
    ]


def _common_factor(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """The factor by which all elements of one tensor differ from those of another, or None if there is none."""
    first, second = first.double().flatten(), second.double().flatten()
    largest = int(second.abs().argmax())
    factor = float(first[largest] / second[largest])
    return factor if abs(factor - 1) > 2 * _LIKENESS and _alike(first, second * factor) else None


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    first, second = first.double(), second.double()
    scale = float(second.abs().max()) if second.numel() else 0.0
    return scale > 0 and float((first - second).abs().max()) <= _LIKENESS * scale


def _near(first: float, second: float) -> bool:
    return abs(first - second) <= _LIKENESS * abs(second)
