"""Compares one step of the sharded run, the baseline and the oracle, and finds the first stage that diverges."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

import torch

from shardproof.harness.judging import numerics
from shardproof.harness.judging.elements import numbers_of
from shardproof.harness.judging.finding import Finding, Guess, Location, Stage
from shardproof.harness.judging.numerics import ADAM_NOISE_ULPS, distance, not_finite, ulp
from shardproof.harness.judging.observations import Measured
from shardproof.harness.judging.signatures import guess_from_values, guess_gradient, guess_norm, guess_weights
from shardproof.harness.parity.oracle import OracleStep, total_norm
from shardproof.harness.parity.protocol import cut
from shardproof.harness.parity.run import Pieces, StepPicture
from shardproof.harness.tensors.pieces import Piece, index_in_full, whole
from shardproof.harness.tensors.trees import tensors_of

#: What is wrong with a pair of a model such as one with dropout.
_DRAWS = (
    "the model or the loss draws random numbers, other ones in each run: leave dropout out (p=0), or compare two runs "
    "that start from one seed with check_exact"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """Parameters that all comparisons of one step share."""

    step: int  # the training step, counted from 0
    rank: int
    member: int  # this rank's position among the data-parallel ranks, from 0 to ``size`` - 1
    size: int
    norm_type: float = 2.0
    # Whether the implementation gives a parameter that no rank used a gradient of zeros, not None.
    unused_is_zero: bool = False
    # Whether the optimizer is adaptive (not SGD), so that elements whose gradient is rounding noise are left out of the
    # comparison of parameters.
    adaptive: bool = False
    single_process: bool = False  # whether one process trained on the whole batch, whose loss no rank's own need equal
    evaluates: bool = False  # whether this is a forward without autograd before the step, and not the step
    frozen: frozenset[str] = frozenset()
    draws_random_numbers: bool = False
    # Why the values of a parameter may differ whose places the model shares and the sharded one does not, by its name.
    untied: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class StepComparison:
    """Compares one step of the sharded run with the same step of the baseline and of the oracle, on one rank."""

    sharded: StepPicture  # the sharded run's step, as local shards; all tensors of the three are on the host
    baseline: StepPicture  # the baseline's step, as full tensors
    oracle: OracleStep  # the oracle's step, as full float64 tensors
    context: Context
    # The distances measured so far, one entry per compared tensor, in order of comparison.
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
        if not self.context.evaluates and not self.context.single_process:
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
                text += "" if found else " (optimizer_state() omits parameters whose state other ranks hold)"
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
            element = None
            if len(found):
                element = index_in_full(mine.cut, oracle.shape, int(found[0]), device=oracle.device)
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
        if result.baseline_ulps > numerics.BASELINE_LIMIT_ULPS:
            raise RuntimeError(
                f"{stage.value} of {name!r}: the baseline itself is {result.baseline_ulps:.3g} ulps from the oracle, "
                f"more than {numerics.BASELINE_LIMIT_ULPS:g}; the case is too ill-conditioned to judge the sharded run"
                + (f": {_DRAWS}" if self.context.draws_random_numbers else "")
            )
        if result.is_too_far:
            element = index_in_full(mine.cut, oracle.shape, result.index, device=oracle.device)
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
        shares = {
            f"rank {rank} microbatch {number}": mine.cut(part) / len(self.oracle.shares)
            for rank, microbatches in enumerate(self.oracle.shares)
            for number, share in enumerate(microbatches)
            if (part := share[name]) is not None
        }
        return guess_gradient(value, expected, own, self.context.member) or guess_weights(value, shares)

    def _finding(
        self, stage: Stage, name: str, element: tuple[int, ...] | None, text: str, guess: Guess | None = None
    ) -> Finding:
        location = Location(stage=stage, step=self.context.step, rank=self.context.rank, name=name, element=element)
        lines = [text, *filter(None, [self.context.untied.get(name.partition(":")[0])])]
        if self.context.draws_random_numbers:
            lines.append(_DRAWS)
        return Finding(location, "\n  ".join(lines), guess)
