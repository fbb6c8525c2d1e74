"""Compares one step of a run with the baseline and the oracle that began it from the run's own state.

Stage by stage, in the order in which a step makes them; the first that diverges is the answer. From the gradient on
nothing but equality within the tolerance counts: 4 times the baseline's error plus 8 ulps, as in the suites. Before it,
losses and own gradients may have one factor in common, because a step that divides by the number of its own
microbatches has another loss in the reference and the same gradient. The optimizer's step is judged from equal
gradients: the reference's takes the run's.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import torch

from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.elements import numbers_of
from shardproof.harness.judging.finding import Stage
from shardproof.harness.judging.numerics import SLACK_ULPS, Distance, distance, not_finite, ulp
from shardproof.harness.judging.observations import Measured
from shardproof.harness.judging.signatures import guess_from_values
from shardproof.harness.planning.request import DTYPES
from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.tensors.layouts import part_of
from shardproof.harness.training import causes
from shardproof.harness.training.outcome import Deviation, StepOutcome, location_of
from shardproof.harness.training.sides import OfRank, Sides
from shardproof.harness.watching.observation import Key, Observed, of_parameter

_SCALED = "gradients after backward, which user code reduces or scales before the optimizer's step"


class Judge:
    """Judges one step."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self._ill: dict[Stage, list[Deviation]] = {}
        self._well: dict[Stage, int] = {}
        self._is_routed_otherwise = False
        #: Whether a gradient before its reduction could be compared.
        self._has_own = False
        self._agrees_after_backward = False
        self.outcome = StepOutcome(sides.step)

    def judge(self) -> StepOutcome:
        """Return what the first stage that diverges shows."""
        if (found := list(self._routing())) or self._is_routed_otherwise:
            self.outcome.found = found
            return self.outcome
        of_parameters = map(self._of_parameters, (Stage.CLIPPED_GRADIENT, Stage.PARAMETER, Stage.OPTIMIZER_STATE))
        stages = (self._outputs(), self._losses(), self._own_gradients(), self._gradients(), self._norms())
        for stage in itertools.chain(stages, of_parameters):
            found = list(stage)
            if not found:
                # Single ones are ill-conditioned; of most, it is the baseline that is wrong.
                found = next((ill for kind, ill in self._ill.items() if len(ill) > self._well.get(kind, 0)), [])
            if found:
                self.outcome.found = found
                if found[0].location.stage == Stage.CLIPPED_GRADIENT and self._agrees_after_backward:
                    self._say(causes.of_scale(self._sides))
                return self.outcome
        return self.outcome

    # Stages ---------------------------------------------------------------------------------

    def _routing(self) -> Iterator[Deviation]:
        """Compare which elements were chosen; a choice between almost equal ones judges nothing after it."""
        for rank, event in self._sides.events(Stage.ROUTING):
            key, chosen = event.key, event.value
            there = self._sides.there(key, rank)
            exact, values = (self._sides.oracle.tensors.get(one) for one in (there, (*there[:6], "values")))
            if exact is None or values is None or exact.shape != chosen.shape or chosen.ndim < 1:
                self.outcome.note("choices of another shape or number than the reference's")
                continue
            self.outcome.compared += 1
            if (base := self._sides.baseline.tensors.get(there)) is not None and not torch.equal(
                base.sort(-1)[0], exact.sort(-1)[0]
            ):
                self._is_routed_otherwise = True
                self.outcome.note("routing: baseline and oracle choose differently, so nothing after it is judged")
                continue
            width = values.shape[-1]
            mine, its = ((one.view(-1, one.shape[-1]) if one.ndim == values.ndim else one.view(-1, 1))
                         for one in (chosen, exact))  # fmt: skip
            if len(mine) * width != values.numel():
                continue  # along another dimension than the last
            differ = (mine.sort(-1).values != its.sort(-1).values).any(-1)
            if not bool(differ.any()):
                continue
            rows = values.double().reshape(-1, width)[differ]
            lost = rows.gather(-1, its[differ]).min(-1).values - rows.gather(-1, mine[differ]).min(-1).values
            margin = float(lost.max()) / ulp(float(values.abs().max()), self._sides.narrow)
            text = f"{int(differ.sum())} of {len(differ)} choices differ, by a margin of {margin:.3g} ulps at most"
            if margin > numerics.ROUTING_ULPS:
                yield self._divergent(Stage.ROUTING, event, rank.rank, f"{text}; {numerics.ROUTING_ULPS:g} are allowed",
                                      name=f"choice {key[4]} of microbatch {key[3]}")  # fmt: skip
            elif not self._is_routed_otherwise:
                self._is_routed_otherwise = True
                self.outcome.note(f"routing: {text}, so later stages of step {self.outcome.step} are not judged")

    def shown(self) -> Deviation | None:
        """Return the first tensor of a module that diverges, in execution order, of all that were seen."""
        firsts = []
        for rank in self._sides.ranks:
            for position, event in enumerate(rank.events.values()):
                is_own = event.stage == Stage.OWN_GRADIENT
                found = next(self._own_gradient(rank, event) if is_own else self._of_module(rank, event), None)
                if found is not None:
                    firsts.append((position, rank.rank, found))
                    break
        return min(firsts, key=lambda one: one[:2])[2] if firsts else None

    def _outputs(self) -> Iterator[Deviation]:
        for rank, event in self._sides.events(Stage.MODULE_OUTPUT):
            if not event.module and not event.call and event.value.ndim:  # a scalar is a loss
                yield from self._of_module(rank, event)

    def _of_module(self, rank: OfRank, event: Observed) -> Iterator[Deviation]:
        """Compare what a module returned, or the gradient of that."""
        key, tensor, sides = event.key, event.value, self._sides
        if event.stage not in (Stage.MODULE_OUTPUT, Stage.OUTPUT_GRADIENT):
            return
        if rank.forwards != sides.counts[rank.data_rank] or sides.oracle.forwards != sides.offsets[-1]:
            self.outcome.note("outputs: the forwards of a step are not one for each microbatch")
            return
        pair = sides.pair(sides.there(key, rank))
        if pair is None or (event.layout is None and pair[0].shape != tensor.shape):
            self.outcome.note("outputs of another shape or place than the reference's")
            return
        if event.layout is not None and event.layout.pending:
            self.outcome.note("outputs that are sums still to be made")
            return
        if event.stage == Stage.OUTPUT_GRADIENT:
            factor = self.outcome.loss_factor or 1.0
            pair = pair[0] * factor, pair[1] * factor
        box = event.layout.box if event.layout is not None else Box(tuple(tensor.shape))
        stage = Stage.OUTPUT if event.stage == Stage.MODULE_OUTPUT and not event.module else event.stage
        name = f"{event.module}, microbatch {key[3]}" if event.module else f"microbatch {key[3]}"
        yield from self._compared(stage, event, rank.rank, tensor, pair, box, name=name)

    def _losses(self) -> Iterator[Deviation]:
        found, places = [], []
        for rank, event in self._sides.events(Stage.LOSS):
            key, tensor = event.key, event.value
            pair = self._sides.pair(self._sides.there(key, rank))
            count = sum(one[0] == Stage.LOSS for one in self._sides.oracle.tensors)
            if pair is None or count != self._sides.offsets[-1] or (event.layout is not None and event.layout.pending):
                self.outcome.note("losses: the backward passes of a step are not one for each microbatch")
                continue
            values = float(tensor), float(pair[0]), float(pair[1])
            if not all(map(math.isfinite, values)):
                yield self._divergent(Stage.LOSS, event, rank.rank, _values(*values), name=f"microbatch {key[3]}")
            found.append(values)
            places.append((rank, key, event))
        if not found:
            return
        runs, bases, exact = (torch.tensor(one, dtype=torch.float64) for one in zip(*found, strict=True))
        factor = _middle(runs, bases)  # of one precision: what rounding has in common cancels
        self.outcome.loss_factor = self._sides.named(factor)[0]
        unit = ulp(float(exact.abs().max()), self._sides.narrow)
        slack = SLACK_ULPS * unit * self._sides.looser
        allowed = abs(factor) * 2 * (float((bases - exact).abs().max()) + slack)
        self.outcome.compared += len(found)
        errors = (runs - factor * exact).abs()
        worst = int(errors.argmax())
        rank, key, event = places[worst]
        scale = unit * abs(factor) or 1.0
        self._measure(Stage.LOSS, event, f"microbatch {key[3]}", float(errors[worst]) / scale,
                      float((bases - exact).abs().max()) / unit, allowed / scale)  # fmt: skip
        if not bool((errors > allowed).any()):
            return
        self._say(causes.of_losses(self._sides, runs / exact, [(rank, key) for rank, key, _ in places]))
        for (rank, key, event), values, error in zip(places, found, errors.tolist(), strict=True):
            if error > allowed:
                text = f"{_values(*values)}; no factor is common to the losses of all microbatches"
                yield self._divergent(Stage.LOSS, event, rank.rank, text, name=f"microbatch {key[3]}")

    def _own_gradients(self) -> Iterator[Deviation]:
        for rank, event in self._sides.events(Stage.OWN_GRADIENT):
            yield from self._own_gradient(rank, event)

    def _own_gradient(self, rank: OfRank, event: Observed) -> Iterator[Deviation]:
        key, sketch = event.key, event.value
        pair, layout, factor = self._sides.pair(self._sides.there(key, rank)), event.layout, self.outcome.loss_factor
        if factor is None:
            return
        is_divided = self._sides.looser > 1 and layout is not None and not layout.mesh
        is_part = layout is None or layout.pending or not layout.box.is_full or is_divided
        if pair is None or is_part:
            self.outcome.note("gradients before their reduction that a rank has in part")
            return
        base, exact = (one.double() * factor for one in pair)
        size = float(exact.norm())
        apart = float((base - exact).norm()) / size if size else math.inf
        if apart > numerics.BASELINE_LIMIT_ULPS * self._sides.eps:
            self.outcome.note("ill-conditioned: gradients before their reduction")
            return
        self.outcome.compared += 1
        self._has_own = True
        residual = float((sketch.double() - exact).norm()) / size
        allowed = 4 * apart + numerics.SKETCH_EPS * self._sides.eps
        if residual > allowed:
            text = (f"microbatch {key[3]}: a relative distance of {residual:.2g} from the oracle's; the baseline's is "
                    f"{apart:.2g}, and {allowed:.2g} are allowed")  # fmt: skip
            yield self._divergent(Stage.OWN_GRADIENT, event, rank.rank, text)

    def _gradients(self) -> Iterator[Deviation]:
        found = list(self._of_parameters(Stage.GRADIENT))
        clipped = list(self._of_parameters(Stage.CLIPPED_GRADIENT)) if found else []
        if not clipped:
            self.outcome.factor = 1.0
        if not found:
            self._agrees_after_backward = bool(self._sides.exact(Stage.GRADIENT))
        elif self.outcome.factor is not None:
            self.outcome.note(_SCALED)
            for key in [key for key in self.outcome.measured if key[1] == Stage.GRADIENT]:
                del self.outcome.measured[key]
        else:
            yield from self._wrong_gradients(found, clipped)

    def _wrong_gradients(self, found: list[Deviation], clipped: list[Deviation]) -> Iterator[Deviation]:
        """Say what gradients are that are wrong after backward and at the optimizer's step, and return one of both."""
        made = causes.diagnosed(self._sides, Stage.GRADIENT)
        since = None
        if any(one.signature != codes.SCALED for _, one in made.values()):
            at_step = causes.diagnosed(self._sides, Stage.CLIPPED_GRADIENT)
            # What is reduced by hand after backward is judged as the optimizer gets it.
            if at_step and all(one.signature == codes.SCALED for _, one in at_step.values()):
                found, made = clipped or found, at_step
        elif (since := self._scaled_since()) is not None:
            # User code scales gradients after backward, as a loop does that divides by counts of all ranks.
            last = since[1]
            if abs(last - 1) <= self._sides.near:
                self.outcome.note(_SCALED)
                return
            found = list(self._norms()) or clipped
            self.outcome.signature, self.outcome.lines = "", []
            made = {name: (ranks, dataclasses.replace(one, factor=last)) for name, (ranks, one) in made.items()}
        before = causes.Before(self.outcome.loss_factor, self._has_own, since)
        self._say(causes.of_gradients(self._sides, made, before))
        if not self.outcome.signature:
            self._say(causes.of_sums(self._sides, dict.fromkeys(one.location.name or "" for one in found)))
        yield from found

    def _scaled_since(self) -> tuple[float, float] | None:
        """The factors of gradients after backward and at the optimizer's step, if user code scales in between."""
        back, last = self._sides.common(Stage.GRADIENT), self._sides.at_step()
        if back is None or last is None or abs(last - back) <= self._sides.near * abs(back):
            return None
        return back, last

    def _say(self, cause: causes.Cause) -> None:
        self.outcome.lines += cause.lines
        self.outcome.signature = cause.signature or self.outcome.signature
        self.outcome.factor = self.outcome.factor if cause.factor is None else cause.factor

    def _norms(self) -> Iterator[Deviation]:
        for rank, event in self._sides.events(Stage.TOTAL_NORM):
            key, tensor = event.key, event.value
            pair = self._sides.pair(key)
            if pair is None:
                self.outcome.note("norms that the reference does not compute")
                continue
            value = self._sides.norm(key, rank)
            for one in self._compared(Stage.TOTAL_NORM, event, rank.rank, value.to(tensor.dtype), pair, Box(())):
                cause = causes.of_norm(self._sides, float(value), float(pair[1]), rank)
                if cause.signature:
                    self.outcome.signature, self.outcome.lines = cause.signature, cause.lines
                yield one

    # Comparisons ----------------------------------------------------------------------------

    def _of_parameters(self, stage: Stage) -> Iterator[Deviation]:
        """Compare a stage's tensor of each parameter on each rank; ranks with the same elements and bits once."""
        known: dict[tuple[Key, Box], tuple[torch.Tensor, list[Deviation]]] = {}
        expected = self._sides.exact(stage)
        for rank in self._sides.ranks:
            mine = rank.state if stage in (Stage.PARAMETER, Stage.OPTIMIZER_STATE) else rank.events
            for key in dict.fromkeys([*expected, *(key for key in mine if key[0] == stage)]):
                here = mine.get(key)
                if here is None or self._sides.pair(key) is None:
                    yield from self._absent(stage, key, rank, here)
                elif here.layout is None or here.layout.pending:
                    self.outcome.note(f"{stage.value}s of unknown layout")
                else:
                    before = known.get((key, here.layout.box))
                    if before is None or not torch.equal(before[0], here.value):
                        before = here.value, list(self._of_parameter(stage, rank.rank, here, here.layout.box))
                        known.setdefault((key, here.layout.box), before)
                    yield from (one.on(rank.rank) for one in before[1])

    def _of_parameter(self, stage: Stage, rank: int, here: Observed, box: Box) -> Iterator[Deviation]:
        pair = self._sides.pair(here.key)
        assert pair is not None
        name = here.parameter + (f": {here.state}" if here.state else "")
        yield from self._compared(stage, here, rank, here.value, pair, box, name=name)

    def _absent(self, stage: Stage, key: Key, rank: OfRank, here: Observed | None) -> Iterator[Deviation]:
        pair = self._sides.pair(key)
        held = rank.state.get((Stage.PARAMETER, *key[1:-1], ""))
        is_empty = held is None or held.value.numel() == 0
        if (here is None and (pair is None or is_empty)) or (here is not None and not bool(here.value.any())):
            return
        text = "there is none; the reference has one" if here is None else "there is one; the reference has none"
        event = here or of_parameter(stage, key[2], None, torch.empty(0), state=key[6])
        yield self._divergent(stage, event, rank.rank, text)

    def _compared(
        self, stage: Stage, event: Observed, rank: int, tensor: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor],
        box: Box, *, name: str = "",
    ) -> Iterator[Deviation]:  # fmt: skip
        if not tensor.is_floating_point():
            return
        if tuple(box.shape) != tuple(pair[1].shape) or box.numel != tensor.numel():
            yield self._divergent(
                stage, event, rank, f"has shape {box.shape}; the reference's is {tuple(pair[1].shape)}"
            )
            return
        base, exact = (part_of(one, box).reshape(tensor.shape) for one in pair)
        tensor, base, exact = tensor.to(exact.device), base.to(exact.device), exact.double()
        self.outcome.compared += 1
        runs = {"the run": tensor, "the baseline": base, "the oracle": exact}
        if (text := not_finite(runs)) is not None:
            yield self._divergent(stage, event, rank, text, name=name)
            return
        magnitude = float(pair[1].abs().max()) if pair[1].numel() else 0.0
        apart, slack = self._apart(stage, tensor, distance(tensor, base, exact, magnitude=magnitude), magnitude)
        if apart.baseline_ulps > numerics.BASELINE_LIMIT_ULPS * slack:
            self.outcome.note(f"ill-conditioned: {stage.value} of {name or event.parameter!r}")
            self._ill.setdefault(stage, []).append(self._divergent(
                stage, event, rank, f"on one rank, the model of parallelize() is {apart.baseline_ulps:.2g} ulps off "
                "that of model(), as are most tensors of this stage", name=name,
            ))  # fmt: skip
            return
        self._well[stage] = self._well.get(stage, 0) + 1
        self._measure(stage, event, name, apart.sharded_ulps, apart.baseline_ulps, apart.allowed_ulps)
        if not apart.is_too_far:
            return
        text, _ = numbers_of(apart, {"run": tensor, "baseline": base, "oracle": exact})
        guess = guess_from_values(tensor, exact, magnitude=magnitude)
        text += f"\n{guess.seen}" if guess is not None else ""
        yield self._divergent(stage, event, rank, text, name=name, index=apart.index, box=box)

    def _apart(self, stage: Stage, tensor: torch.Tensor, apart: Distance, magnitude: float) -> tuple[Distance, float]:
        """Return a distance with what the dtypes of the step allow of it, and by what its ulp is too small.

        Args:
            magnitude: the largest of the oracle's full tensor.
        """
        sides, slack = self._sides, 1.0
        if stage < Stage.PARAMETER:
            slack = ulp(magnitude, sides.narrow) / apart.unit
        if stage is Stage.CLIPPED_GRADIENT:
            added = sides.added_to_norms * magnitude / apart.unit
            apart = dataclasses.replace(apart, baseline_ulps=apart.baseline_ulps + added)
        if slack > 1:
            # One rounding in the narrowest dtype is half an ulp, which few elements of the baseline may miss by chance.
            apart = dataclasses.replace(apart, baseline_ulps=max(apart.baseline_ulps, slack / 2))
        slack *= sides.looser if tensor.ndim == 0 else 1.0
        if sides.request.oracle == "none" or torch.finfo(DTYPES[sides.request.oracle]).eps >= sides.eps:
            # Nothing is known of the rounding of a baseline whose oracle is no finer.
            apart = dataclasses.replace(apart, baseline_ulps=SLACK_ULPS * slack, is_scalar=False)
        if tensor.numel() != 1 or slack <= 1:
            return apart, slack
        # One sample of rounding has no largest of many to be compared with.
        unit = apart.unit * slack
        return Distance(apart.sharded_ulps / slack, apart.baseline_ulps / slack, apart.index, unit, is_scalar=True), 1.0

    def _measure(self, stage: Stage, event: Observed, name: str, own: float, base: float, allowed: float) -> None:
        made = Measured(stage, self.outcome.step, name or event.parameter or event.module, own, base, allowed)
        before = self.outcome.measured.get((event.module, stage))
        if before is None or made.used > before.used:
            self.outcome.measured[event.module, stage] = made

    def _divergent(self, stage: Stage, event: Observed, rank: int, text: str, *, name: str = "", index: int = -1,
                   box: Box | None = None) -> Deviation:  # fmt: skip
        location = location_of(stage, event, self.outcome.step, rank, index, name=name, box=box)
        return Deviation(location, event.module, text)


def _middle(runs: torch.Tensor, exact: torch.Tensor) -> float:
    """The factor between two lists that the median pair has."""
    usable = exact != 0
    return float((runs[usable] / exact[usable]).median()) if bool(usable.any()) else 1.0


def _values(run: float, base: float, exact: float) -> str:
    return f"run {run:.6g}, baseline {base:.6g}, oracle {exact:.6g}"
