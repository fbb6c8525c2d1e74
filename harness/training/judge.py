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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.elements import numbers_of
from shardproof.harness.judging.finding import Location, Stage
from shardproof.harness.judging.numerics import SLACK_ULPS, Distance, distance, not_finite, ulp
from shardproof.harness.judging.observations import Measured
from shardproof.harness.judging.signatures import (
    Diagnosis,
    diagnose,
    fit,
    guess_from_values,
    guess_norm,
    name_of_factor,
    total,
)
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.planning.request import DTYPES
from shardproof.harness.tensors.fingerprints import Box, K, digest
from shardproof.harness.tensors.layouts import part_of
from shardproof.harness.training.findings import listed
from shardproof.harness.training.request import Request, products
from shardproof.harness.watching.assembly import Held, distinct, full_tensor
from shardproof.harness.watching.observation import ByKey, Key, Observed, key_of, of_parameter

_SCALED = "gradients after backward, which user code reduces or scales before the optimizer's step"


@dataclasses.dataclass(frozen=True)
class OfRank:
    """What one rank of the run has seen of a step.

    Attributes:
        state: after the step.
        forwards: how many there were.
        norm_types: of the calls that computed a norm.
        data_rank: which data it reads.
        is_fully_sharded: whether its model has units of ``fully_shard``.
    """

    rank: int
    events: ByKey
    state: ByKey
    forwards: int
    norm_types: Sequence[float]
    data_rank: int
    is_fully_sharded: bool


@dataclasses.dataclass(frozen=True)
class OfReference:
    """What the baseline or the oracle has seen of the step: full tensors."""

    tensors: Mapping[Key, torch.Tensor]
    forwards: int


@dataclasses.dataclass(frozen=True)
class Divergent:
    """A tensor that is too far from the oracle on a rank."""

    location: Location
    module: str
    text: str

    def on(self, rank: int) -> "Divergent":
        """Return the same of another rank, which has the same bits."""
        return dataclasses.replace(self, location=dataclasses.replace(self.location, rank=rank))


@dataclasses.dataclass
class Outcome:
    """What is said of one step.

    Attributes:
        found: the tensors of the first stage that diverges.
        lines: what the stage as a whole shows: a factor, a signature.
        signature: of the mistake that it looks like; empty if it looks like none.
        factor: the gradients of the run over the oracle's; None where they have no common one.
        loss_factor: the same of losses.
        measured: of each module and stage the distance that used most of what is allowed.
        notes: what was not judged, and why.
        shown: with capture on, the first tensor of a module that diverges.
    """

    step: int
    found: list[Divergent] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)
    signature: str = ""
    factor: float | None = None
    loss_factor: float | None = None
    compared: int = 0
    measured: dict[tuple[str, Stage], Measured] = dataclasses.field(default_factory=dict)
    notes: dict[str, int] = dataclasses.field(default_factory=dict)
    shown: Divergent | None = None

    def note(self, text: str) -> None:
        """Count one more tensor that was not judged for a reason."""
        self.notes[text] = self.notes.get(text, 0) + 1


def _parts(held: Iterable[Observed]) -> list[Held] | None:
    """What ranks hold of a tensor; None where its place is not known, or a sum is still to be made."""
    found = []
    for rank, one in enumerate(held):
        if one.layout is None or one.layout.pending:
            return None
        found.append(Held(rank, one.layout, one.value))
    return found


def full_of(held: Iterable[Observed]) -> torch.Tensor | None:
    """Assemble a full tensor of what ranks hold of it; None where that is not known or leaves elements out."""
    parts = _parts(held)
    return None if parts is None else full_tensor(parts)


def state_of(ranks: Sequence[ByKey]) -> dict[Key, torch.Tensor]:
    """Assemble the state of a run from that of its ranks."""
    keys = dict.fromkeys(key for seen in ranks for key in seen)
    found = {key: full_of(seen[key] for seen in ranks if key in seen) for key in keys}
    return {key: full for key, full in found.items() if full is not None}


def compare_initial(starts: Sequence[ByKey], expected: ByKey) -> Outcome:
    """Compare the parameters before the first step with those that the baseline was made with, bit for bit."""
    outcome = Outcome(0)
    full = {key: one for key, one in state_of([expected]).items() if key[0] == Stage.PARAMETER}
    moved: set[tuple[int, int]] = set()
    #: By name and part, the ranks that hold it, whosever it should be.
    held: dict[tuple[Key, Box], set[Box]] = {}
    for (rank, seen), (key, whole) in itertools.product(enumerate(starts), full.items()):
        if key not in seen or (layout := seen[key].layout) is None:
            outcome.note("initial parameters of which it is not known where their elements belong")
            continue
        one, tensor = seen[key], seen[key].value
        outcome.compared += 1
        mine = part_of(whole, layout.box).reshape(tensor.shape).cpu()
        if torch.equal(tensor, mine):
            held.setdefault((key, layout.box), set()).add(layout.box)
            continue
        for other, there in enumerate(starts):
            its = there[key].layout if key in there else None
            if its is not None and its.box != layout.box and its.box.numel == tensor.numel() and torch.equal(
                part_of(whole, its.box).reshape(tensor.shape).cpu(), tensor
            ):  # fmt: skip
                moved.add((rank, other))
                held.setdefault((key, its.box), set()).add(layout.box)
                break
        index = int((tensor != mine).flatten().nonzero()[0])
        text = f"run {float(tensor.flatten()[index]):.9g}, reference {float(mine.flatten()[index]):.9g}"
        location = _location(Stage.INITIAL, one, 0, rank, index)
        outcome.found.append(Divergent(location, one.module, f"{text}: initial values must be equal"))
    turned = [key[2] for key, one in state_of(starts).items() if key in full and one.ndim == 2
              and not torch.equal(one, full[key].cpu()) and torch.equal(one.t(), full[key].cpu())]  # fmt: skip
    if turned:
        outcome.lines.append(f"{listed(turned)}: the transpose of the reference's")
    elif moved:
        outcome.signature = codes.MISPLACED
        names = len({one.location.name for one in outcome.found})
        told = [f"rank {rank} holds what rank {other} should" for rank, other in sorted(moved)[:4]]
        is_another_order = all(len(boxes) == 1 for boxes in held.values())
        outcome.lines = [f"{', '.join(told)} ({names} of {len(full)} parameters) [{codes.MISPLACED}]",
                         "shards are in another order of ranks than that of the mesh" if is_another_order
                         else "some shards are on several ranks in place of others"]  # fmt: skip
    return outcome


class Judge:
    """Judges one step.

    Args:
        ranks: what each rank of the run has seen, in the order of ranks.
        counts: the number of microbatches of each data rank.
        narrow: the narrowest dtype in which the baseline computes.
        tokens: by data rank and microbatch, the number of labels that count; 0 where there are none.
        earlier: what :meth:`sums` returned for the steps before, the last one first.
    """

    def __init__(
        self, request: Request, step: int, ranks: Sequence[OfRank], baseline: OfReference, oracle: OfReference, *,
        counts: Sequence[int], narrow: torch.dtype, tokens: Sequence[Sequence[int]],
        earlier: Sequence[Mapping[str, torch.Tensor]] = (),
    ) -> None:  # fmt: skip
        self._request, self._ranks, self._baseline, self._oracle = request, ranks, baseline, oracle
        self._counts, self._narrow, self._tokens, self._earlier = counts, narrow, tokens, earlier
        self._offsets = [0, *itertools.accumulate(counts)]
        self._eps = float(torch.finfo(narrow).eps)
        #: Ranks that compute parts of one forward round otherwise than one rank does, and a scalar shows all of it.
        is_divided = any(size > 1 for name, size in request.mesh if name not in request.data_dims)
        self._looser = numerics.LOOSER_IN_PARTS if is_divided else 1.0
        #: Within which a factor is a name's.
        self._near = min(numerics.SAID_EPS * self._eps, numerics.MOST_OF_A_FACTOR)
        self._ill: dict[Stage, list[Divergent]] = {}
        self._well: dict[Stage, int] = {}
        self._is_routed_otherwise = False
        #: Whether a gradient before its reduction could be compared.
        self._has_own = False
        self._agrees_after_backward = False
        #: The factors of gradients after backward and at the optimizer's step, where user code scales in between.
        self._since: tuple[float, float] | None = None
        self.outcome = Outcome(step)

    def judge(self) -> Outcome:
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
                    self._say_of_scale()
                return self.outcome
        return self.outcome

    # Stages ---------------------------------------------------------------------------------

    def _routing(self) -> Iterator[Divergent]:
        """Compare which elements were chosen; a choice between almost equal ones judges nothing after it."""
        for rank, event in self._events(Stage.ROUTING):
            key, chosen = event.key, event.value
            there = self._there(key, rank)
            exact, values = self._oracle.tensors.get(there), self._oracle.tensors.get((*there[:6], "values"))
            if exact is None or values is None or exact.shape != chosen.shape or chosen.ndim < 1:
                self.outcome.note("choices of another shape or number than the reference's")
                continue
            self.outcome.compared += 1
            if (base := self._baseline.tensors.get(there)) is not None and not torch.equal(
                base.sort(-1)[0], exact.sort(-1)[0]
            ):
                self._is_routed_otherwise = True
                self.outcome.note("routing: baseline and oracle choose otherwise, so that nothing after it is judged")
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
            margin = float(lost.max()) / ulp(float(values.abs().max()), self._narrow)
            text = f"{int(differ.sum())} of {len(differ)} choices differ, by a margin of {margin:.3g} ulps at most"
            if margin > numerics.ROUTING_ULPS:
                yield self._divergent(Stage.ROUTING, event, rank.rank, f"{text}; {numerics.ROUTING_ULPS:g} are allowed",
                                      name=f"choice {key[4]} of microbatch {key[3]}")  # fmt: skip
            elif not self._is_routed_otherwise:
                self._is_routed_otherwise = True
                self.outcome.note(f"routing: {text}, so that step {self.outcome.step} is judged no further")

    def shown(self) -> Divergent | None:
        """Return the first tensor of a module that diverges, in execution order, of all that were seen."""
        firsts = []
        for rank in self._ranks:
            for position, event in enumerate(rank.events.values()):
                is_own = event.stage == Stage.OWN_GRADIENT
                found = next(self._own_gradient(rank, event) if is_own else self._of_module(rank, event), None)
                if found is not None:
                    firsts.append((position, rank.rank, found))
                    break
        return min(firsts, key=lambda one: one[:2])[2] if firsts else None

    def _outputs(self) -> Iterator[Divergent]:
        for rank, event in self._events(Stage.MODULE_OUTPUT):
            if not event.module and not event.call and event.value.ndim:  # a scalar is a loss
                yield from self._of_module(rank, event)

    def _of_module(self, rank: OfRank, event: Observed) -> Iterator[Divergent]:
        """Compare what a module returned, or the gradient of that."""
        key, tensor = event.key, event.value
        if event.stage not in (Stage.MODULE_OUTPUT, Stage.OUTPUT_GRADIENT):
            return
        if rank.forwards != self._counts[rank.data_rank] or self._oracle.forwards != self._offsets[-1]:
            self.outcome.note("outputs: the forwards of a step are not one for each microbatch")
            return
        pair = self._pair(self._there(key, rank))
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

    def _losses(self) -> Iterator[Divergent]:
        found, places = [], []
        for rank, event in self._events(Stage.LOSS):
            key, tensor = event.key, event.value
            pair = self._pair(self._there(key, rank))
            count = sum(one[0] == Stage.LOSS for one in self._oracle.tensors)
            if pair is None or count != self._offsets[-1] or (event.layout is not None and event.layout.pending):
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
        self.outcome.loss_factor = self._named(factor)[0]
        unit = ulp(float(exact.abs().max()), self._narrow)
        slack = SLACK_ULPS * unit * self._looser
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
        self._say_of_losses(runs / exact, places)
        for (rank, key, event), values, error in zip(places, found, errors.tolist(), strict=True):
            if error > allowed:
                text = f"{_values(*values)}; no factor is common to the losses of all microbatches"
                yield self._divergent(Stage.LOSS, event, rank.rank, text, name=f"microbatch {key[3]}")

    def _say_of_losses(self, ratios: torch.Tensor, places: Sequence[tuple[OfRank, Key, Observed]]) -> None:
        own = torch.tensor([float(self._tokens[rank.data_rank][key[3]]) for rank, key, _ in places])
        sums = torch.tensor([float(sum(self._tokens[rank.data_rank])) for rank, _, _ in places])
        total, count = sum(map(sum, self._tokens)), self._offsets[-1]
        spread = self._near
        readers = self._request.data_size
        alike = [
            (who, tokens, parts)
            for who, tokens, parts in (("microbatch", own, count), ("rank", sums, readers))
            if bool((tokens > 0).all()) and not bool((tokens == tokens[0]).all())
            and float((ratios * tokens / (ratios * tokens)[0] - 1).abs().max()) <= spread
        ]  # fmt: skip
        for who, tokens, parts in sorted(alike, key=lambda one: abs(float((ratios * one[1])[0]) / total - 1))[:1]:
            values = ", ".join(f"{one:.4g}" for one in _once((total / (parts * tokens)).tolist())[:6])
            counted = ", ".join(f"{one:.0f}" for one in _once(tokens.tolist())[:6])
            plural = "microbatches" if who == "microbatch" else "ranks"
            self.outcome.signature = codes.WEIGHTED
            self.outcome.lines += [
                f"losses have no common factor: {values}, and these are (tokens of all {plural}) / ({plural} x tokens "
                "of this one)",
                f"each {who} counts alike [{codes.WEIGHTED}]: the sum of its losses is divided by its own tokens "
                f"({counted}), not by those of the step ({total})",
            ]
            return
        shown_ = ", ".join(f"{one:.4g}" for one in _once(ratios.tolist())[:6])
        self.outcome.lines.append(f"losses have no common factor: they are {shown_} times the reference's")

    def _own_gradients(self) -> Iterator[Divergent]:
        for rank, event in self._events(Stage.OWN_GRADIENT):
            yield from self._own_gradient(rank, event)

    def _own_gradient(self, rank: OfRank, event: Observed) -> Iterator[Divergent]:
        key, sketch = event.key, event.value
        pair, layout, factor = self._pair(self._there(key, rank)), event.layout, self.outcome.loss_factor
        if factor is None:
            return
        is_divided = self._looser > 1 and layout is not None and not layout.mesh
        is_part = layout is None or layout.pending or not layout.box.is_full or is_divided
        if pair is None or is_part:
            self.outcome.note("gradients before their reduction of which a rank has a part")
            return
        base, exact = (one.double() * factor for one in pair)
        size = float(exact.norm())
        apart = float((base - exact).norm()) / size if size else math.inf
        if apart > numerics.BASELINE_LIMIT_ULPS * self._eps:
            self.outcome.note("ill-conditioned: gradients before their reduction")
            return
        self.outcome.compared += 1
        self._has_own = True
        residual, allowed = float((sketch.double() - exact).norm()) / size, 4 * apart + numerics.SKETCH_EPS * self._eps
        if residual > allowed:
            text = (f"microbatch {key[3]}: a relative distance of {residual:.2g} from the oracle's; the baseline's is "
                    f"{apart:.2g}, and {allowed:.2g} are allowed")  # fmt: skip
            yield self._divergent(Stage.OWN_GRADIENT, event, rank.rank, text)

    def _gradients(self) -> Iterator[Divergent]:
        found = list(self._of_parameters(Stage.GRADIENT))
        clipped = list(self._of_parameters(Stage.CLIPPED_GRADIENT)) if found else []
        if not clipped:
            self.outcome.factor = 1.0
        if not found:
            self._agrees_after_backward = any(key[0] == Stage.GRADIENT for key in self._oracle.tensors)
            return
        if self.outcome.factor is not None:
            self.outcome.note(_SCALED)
            for key in [key for key in self.outcome.measured if key[1] == Stage.GRADIENT]:
                del self.outcome.measured[key]
            return
        made, at_step = self._diagnosed(Stage.GRADIENT), self._diagnosed(Stage.CLIPPED_GRADIENT)
        if any(one.signature != codes.SCALED for _, one in made.values()):
            # What is reduced by hand after backward is judged as the optimizer gets it.
            if at_step and all(one.signature == codes.SCALED for _, one in at_step.values()):
                found, made = clipped or found, at_step
        else:
            back, last = self._common(Stage.GRADIENT), self._at_step()
            if back is not None and last is not None and abs(last - back) > self._near * abs(back):
                # User code scales gradients after backward, as a loop does that divides by counts of all ranks.
                if abs(last - 1) <= self._near:
                    self.outcome.note(_SCALED)
                    return
                found, self._since = list(self._norms()) or clipped, (back, last)
                self.outcome.signature, self.outcome.lines = "", []
                made = {name: (ranks, dataclasses.replace(one, factor=last)) for name, (ranks, one) in made.items()}
        self._say(made)
        if not self.outcome.signature:
            self._say_of_sums(found)
        yield from found

    @property
    def _like(self) -> float:
        """Within which a gradient is what it is said to be."""
        return min(numerics.SAID_EPS * self._eps, numerics.MOST_OF_A_GRADIENT)

    def _common(self, stage: Stage) -> float | None:
        """Return by what all gradients of a stage are the reference's on the first rank; None without one factor."""
        found = []
        for key, exact in self._oracle.tensors.items():
            if key[0] == stage:
                mine, whole = self._assembled(key, self._ranks[0]), digest(exact, Box(tuple(exact.shape))).numbers[:K]
                factor, rest = (0.0, 1.0) if mine is None else fit(mine.double(), whole.double())
                if rest > self._like:
                    return None
                found.append(factor)
        factors = torch.tensor(found, dtype=torch.float64)
        middle = float(factors.median()) if found else 0.0
        return middle if middle and bool(((factors - middle).abs() <= self._near * abs(middle)).all()) else None

    def _at_step(self) -> float | None:
        """Return the factor of gradients as the optimizer gets them, of which clipping is no part."""
        for key, seen in self._ranks[0].events.items():
            if key[0] == Stage.TOTAL_NORM and seen.value.numel() == 1 and (pair := self._pair(key)) is not None:
                exact = float(pair[1])
                return float(seen.value) / exact if exact else None
        return self._common(Stage.CLIPPED_GRADIENT)

    def _norms(self) -> Iterator[Divergent]:
        for rank, event in self._events(Stage.TOTAL_NORM):
            key, tensor = event.key, event.value
            pair = self._pair(key)
            value = tensor.double()
            if pair is None:
                self.outcome.note("norms that the reference does not compute")
                continue
            if event.layout is not None and event.layout.pending:
                mine = self._ranks[rank.rank].norm_types
                kind = mine[min(key[4], len(mine) - 1)] if mine else 2.0
                parts = [self._ranks[one].events[key].value.double() for one in event.layout.pending
                         if key in self._ranks[one].events]  # fmt: skip
                value = torch.linalg.vector_norm(torch.stack(parts), kind)
            for one in self._compared(Stage.TOTAL_NORM, event, rank.rank, value.to(tensor.dtype), pair, Box(())):
                kind = rank.norm_types[0] if rank.norm_types else 2.0
                held = [one.value.double().flatten() for one in rank.events.values() if one.stage == Stage.GRADIENT]
                local = float(torch.linalg.vector_norm(torch.cat(held), kind)) if held else 0.0
                guess = guess_norm(float(value), float(pair[1]), local, len(self._ranks), kind)
                text = self._summed(float(value), float(pair[1]), rank, kind)
                if text := text or (f"{guess.seen} [{codes.LOCAL_NORM}]" if guess is not None else ""):
                    self.outcome.signature, self.outcome.lines = codes.LOCAL_NORM, [text]
                yield one

    # Comparisons ----------------------------------------------------------------------------

    def _of_parameters(self, stage: Stage) -> Iterator[Divergent]:
        """Compare a stage's tensor of each parameter on each rank; ranks with the same elements and bits once."""
        known: dict[tuple[Key, Box], tuple[torch.Tensor, list[Divergent]]] = {}
        expected = [key for key in self._oracle.tensors if key[0] == stage]
        for rank in self._ranks:
            mine = rank.state if stage in (Stage.PARAMETER, Stage.OPTIMIZER_STATE) else rank.events
            for key in dict.fromkeys([*expected, *(key for key in mine if key[0] == stage)]):
                pair, here = self._pair(key), mine.get(key)
                if here is None or pair is None:
                    yield from self._absent(stage, key, rank, here, pair)
                    continue
                event, tensor = here, here.value
                if event.layout is None or event.layout.pending:
                    self.outcome.note(f"{stage.value}s of which it is not known where their elements belong")
                    continue
                box = event.layout.box
                if (before := known.get((key, box))) is not None and torch.equal(before[0], tensor):
                    yield from (one.on(rank.rank) for one in before[1])
                    continue
                name = event.parameter + (f": {event.state}" if event.state else "")
                found = list(self._compared(stage, event, rank.rank, tensor, pair, box, name=name))
                known.setdefault((key, box), (tensor, found))
                yield from found

    def _absent(
        self, stage: Stage, key: Key, rank: OfRank, here: Observed | None,
        pair: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> Iterator[Divergent]:  # fmt: skip
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
    ) -> Iterator[Divergent]:  # fmt: skip
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
        apart = distance(tensor, base, exact, magnitude=magnitude)
        slack = ulp(magnitude, self._narrow) / apart.unit if stage < Stage.PARAMETER else 1.0
        if slack > 1:
            # One rounding in the narrowest dtype is half an ulp, which few elements of the baseline may miss by chance.
            apart = dataclasses.replace(apart, baseline_ulps=max(apart.baseline_ulps, slack / 2))
        slack *= self._looser if tensor.ndim == 0 else 1.0
        if self._request.oracle == "none" or torch.finfo(DTYPES[self._request.oracle]).eps >= self._eps:
            # Nothing is known of the rounding of a baseline whose oracle is no finer.
            apart = dataclasses.replace(apart, baseline_ulps=SLACK_ULPS * slack, is_scalar=False)
        if tensor.numel() == 1 and slack > 1:
            # One sample of rounding has no largest of many to be compared with.
            unit = apart.unit * slack
            apart = Distance(apart.sharded_ulps / slack, apart.baseline_ulps / slack, apart.index, unit, is_scalar=True)
            slack = 1.0
        if apart.baseline_ulps > numerics.BASELINE_LIMIT_ULPS * slack:
            self.outcome.note(f"ill-conditioned: {stage.value} of {name or event.parameter!r}")
            self._ill.setdefault(stage, []).append(self._divergent(
                stage, event, rank, f"on one rank, what parallelize() makes is {apart.baseline_ulps:.2g} ulps off the "
                "model itself, as are most tensors of this stage", name=name,
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

    def _measure(self, stage: Stage, event: Observed, name: str, own: float, base: float, allowed: float) -> None:
        made = Measured(stage, self.outcome.step, name or event.parameter or event.module, own, base, allowed)
        before = self.outcome.measured.get((event.module, stage))
        if before is None or made.used > before.used:
            self.outcome.measured[event.module, stage] = made

    # Signatures -----------------------------------------------------------------------------

    def _diagnosed(self, stage: Stage) -> dict[str, tuple[list[int], Diagnosis]]:
        """Return what each gradient is, and on which ranks; of those where it is several things, the worst."""
        found: dict[str, tuple[list[int], Diagnosis]] = {}
        for name, parts in self._parts().items():
            key = key_of(stage, name)
            mine: dict[str, tuple[list[int], Diagnosis]] = {}
            for rank in self._ranks:
                vector = self._assembled(key, rank)
                if vector is None:
                    continue
                made = diagnose(
                    vector, parts, rank=rank.data_rank, groups=self._groups(rank), tolerance=self._like,
                    earlier=[one[name] for one in self._earlier if name in one],
                )  # fmt: skip
                if made is not None:
                    mine.setdefault(made.signature, ([], made))[0].append(rank.rank)
            if mine:
                found[name] = mine[max(mine)]
        return found

    def _say(self, made: Mapping[str, tuple[list[int], Diagnosis]]) -> None:
        """Say what the gradients of a stage are, if it is one thing."""
        others = {name: one for name, one in made.items() if one[1].signature != codes.SCALED}
        count = len({key[2] for key in self._oracle.tensors if key[0] == Stage.GRADIENT})
        if not made or 2 * len(made) < count:
            return
        if not others:
            self._say_of_factor({name: one.factor for name, (_, one) in made.items()}, count)
            return
        first = next(iter(others.values()))[1]
        ranks = {rank for mine, _ in others.values() for rank in mine}
        who = "every rank" if len(ranks) == len(self._ranks) else ranks_of(ranks)
        self.outcome.signature = first.signature
        self.outcome.lines.append(f"each gradient of {who} {first.text} [{first.signature}] (c = {first.factor:.4f}, "
                                  f"residual {first.residual:.0e}; {len(others)} of {count} parameters: "
                                  f"{listed(list(others))})")  # fmt: skip

    def _say_of_sums(self, found: Sequence[Divergent]) -> None:
        """Say if ranks of one data rank each have a part of a gradient of which they hold the same elements."""
        names = []
        for name in dict.fromkeys(one.location.name or "" for one in found):
            key = key_of(Stage.GRADIENT, name)
            held = [rank.events[key] for rank in self._ranks if rank.data_rank == 0 and key in rank.events]
            if len(held) < 2 or key not in self._oracle.tensors or len({one.layout for one in held}) > 1:
                continue
            layout = held[0].layout
            full = torch.stack([one.value.double() for one in held]).sum(0)
            exact = None if layout is None else part_of(self._oracle.tensors[key], layout.box).reshape(full.shape).cpu()
            if exact is not None and float((full - exact).norm()) <= self._near * float(exact.norm()):
                names.append(name)
        if names:
            dims = [name for name, size in self._request.mesh if name not in self._request.data_dims and size > 1]
            self.outcome.signature = codes.APART
            self.outcome.lines.append(f"ranks of {', '.join(dims)} hold the same elements of {listed(names)} and have "
                                      f"different gradients: the sum over {dims[0]} is missing "
                                      f"[{codes.APART}]")  # fmt: skip

    def _say_of_scale(self) -> None:
        """Say if gradients that agree after backward have one factor at the step, and of which norm that is."""
        factors = []
        for rank in self._ranks:
            pairs = []
            for key, seen in rank.events.items():
                if key[0] == Stage.CLIPPED_GRADIENT and key in self._oracle.tensors and seen.layout is not None:
                    exact = part_of(self._oracle.tensors[key], seen.layout.box).reshape(seen.value.shape)
                    pairs.append((seen.value.double().flatten(), exact.double().flatten().cpu()))
            factor, residual = fit(*(torch.cat(side) for side in zip(*pairs, strict=True))) if pairs else (0.0, 1.0)
            if factor <= 0 or residual > self._near:
                return
            factors.append(factor)
        wrong = [one for one, factor in zip(self._ranks, factors, strict=True) if abs(factor - 1) > self._near]
        shown = ", ".join(_once(f"{factors[one.rank]:.4g}" for one in wrong)[:6])
        where = "every rank" if len(wrong) == len(self._ranks) else ranks_of([one.rank for one in wrong])
        size = math.hypot(*(float(torch.linalg.vector_norm(tensor.double()))
                            for key, tensor in self._oracle.tensors.items() if key[0] == Stage.GRADIENT))  # fmt: skip
        told = [self._summed(size / factors[one.rank], size, one, 2.0) for one in wrong]
        is_norm = bool(told and told[0] and len(set(told)) == 1)
        named = {name for one in wrong if (name := self._named(factors[one.rank])[1])}
        why = "--off clipping shows whether clip_grad_norm_() scales them"
        if is_norm:
            why = "they are scaled by another norm"
        elif len(named) == 1 and len(wrong) == len(self._ranks):
            why = f"user code multiplies them by {named.pop()} x what the reference's are multiplied by"
        self.outcome.lines.append(f"gradients agree after backward and are {shown} x the reference's at the "
                                  f"optimizer's step on {where}: {why}")  # fmt: skip
        if is_norm:
            self.outcome.signature = codes.LOCAL_NORM
            self.outcome.lines.append(told[0])

    def _summed(self, norm: float, exact: float, rank: OfRank, kind: float) -> str:
        """Say over which dimensions of the mesh a norm sums what ranks hold; nothing if over none."""
        near = max(self._near, numerics.NORM_ROUNDING) * norm
        if abs(norm - exact) <= near:
            return ""  # rounding, which no sum over ranks explains
        held = []
        for one in self._ranks:
            mine = [seen.value.double().flatten() for seen in one.events.values() if seen.stage == Stage.GRADIENT]
            held.append(torch.linalg.vector_norm(torch.cat(mine), kind) if mine else torch.zeros(()))
        dims = [(name, size) for name, size in self._request.mesh if size > 1]
        places = list(itertools.product(*(range(size) for _, size in dims)))
        for count in range(len(dims) + 1):
            for some in itertools.combinations(range(len(dims)), count):
                others = [number for number in range(len(dims)) if number not in some]
                group = [held[one] for one, place in enumerate(places)
                         if all(place[number] == places[rank.rank][number] for number in others)]  # fmt: skip
                if abs(float(torch.linalg.vector_norm(torch.stack(group), kind)) - norm) > near:
                    continue
                over = " and ".join(dims[number][0] for number in some)
                if not some:
                    text = "it is the norm of what this rank alone holds: nothing of other ranks is in it"
                    return f"{text} [{codes.LOCAL_NORM}]"
                if norm > exact:
                    text = f"it sums what each rank of {over} holds, and what several hold as often as they do"
                    return f"{text} [{codes.LOCAL_NORM}]"
                lacks = " and ".join(dims[number][0] for number in others)
                return f"it sums what the ranks of {over} hold, and nothing over {lacks} [{codes.LOCAL_NORM}]"
        return ""

    def _say_of_factor(self, factors: Mapping[str, float], count: int) -> None:
        wrong = {name: one for name, one in factors.items() if abs(one - 1) > self._near}
        if not wrong:
            return
        values = torch.tensor(list(wrong.values()), dtype=torch.float64)
        factor = float(values.median())
        spread = float((values / factor - 1).abs().max()) if factor else math.inf
        if spread > self._near:
            return
        exact, name = self._named(factor)
        self.outcome.factor, self.outcome.signature = exact, codes.SCALED
        told = f": {exact:.4g} is {name}" if name else ""
        if name.startswith("1 / "):
            told = f": 1/{1 / exact:.4g} is {name}"
        everything = len(wrong) == len(factors)
        which = "every gradient is" if everything else f"the gradients of {listed(list(wrong))} are"
        at = " at the optimizer's step, before clipping" if self._since is not None else ""
        lines = [f"{which} exactly {factor:.4f} x the reference's{at} ({len(wrong)} of {count} parameters, spread "
                 f"{spread:.0e}){told} [{codes.SCALED}]"]  # fmt: skip
        loss, size = self.outcome.loss_factor, self._request.data_size
        if self._since is not None:
            back, last = self._since
            lines.append(f"after backward it is {back:.4g} x, and user code multiplies it by {last / back:.4g} x what "
                         f"the reference's is multiplied by: {1 / back:.4g} x is right")  # fmt: skip
            lines.append(f"multiply gradients by {self._mend(last)} more before the step")
        elif loss is not None:
            told, since = ("losses and own gradients", "backward") if self._has_own else ("losses", "the loss")
            lines.append(f"{told} agree (factor {loss:.4g}): the mistake lies between {since} and the gradients")
        if self._since is None and everything and loss == 1 and abs(factor * size - 1) < self._near:
            others = ", or set_gradient_divide_factor(1) of fully_shard"
            lines.append(
                "the loss of a microbatch is the reference's, and its gradients are averaged over the ranks besides: "
                f"multiply it by {self._mend(1 / size)}{others * self._ranks[0].is_fully_sharded}"
            )
        elif self._since is None and everything:
            lines.append(f"multiply the loss of each microbatch by {self._mend(exact)}")
        self.outcome.lines += lines + (self._hidden() if everything else [])

    def _mend(self, factor: float) -> str:
        """Return what to multiply by where a factor is wrong: the reference runs the same step, on one rank."""
        exact, name = self._named(1 / factor)
        return f"{name or 'a number of the mesh'} ({exact:.4g} here, and 1 on one rank)"

    def _hidden(self) -> list[str]:
        """Say what does not show the factor, and what does."""
        norms = [(float(seen.value), float(self._oracle.tensors[key])) for key, seen in self._ranks[0].events.items()
                 if key[0] == Stage.TOTAL_NORM and key in self._oracle.tensors]  # fmt: skip
        if self._request.optimizer != "adamw" and not any(
            key[0] == Stage.OPTIMIZER_STATE and key[6] == "exp_avg_sq" for key in self._oracle.tensors
        ):
            return []
        told = f" ({norms[0][0]:.3g} for {norms[0][1]:.3g} on rank 0)" if norms else ""
        return [f"Adam hides it, as it divides by the size of the gradient; the norm{told} and clipping do not"]

    def sums(self) -> dict[str, torch.Tensor]:
        """Return the sketches of what all microbatches contribute to each gradient together."""
        return {name: total(parts) for name, parts in self._parts().items()}

    def _parts(self) -> dict[str, dict[int, list[torch.Tensor]]]:
        """Return the sketches of what each microbatch contributes to each of the baseline's gradients, by data rank."""
        found: dict[str, dict[int, list[torch.Tensor]]] = {}
        for key, vector in self._baseline.tensors.items():
            if key[0] == Stage.OWN_GRADIENT:
                reader = sum(key[3] >= offset for offset in self._offsets[1:])
                if reader < len(self._counts):
                    found.setdefault(key[2], {}).setdefault(reader, []).append(vector.double())
        return found

    def _assembled(self, key: Key, rank: OfRank) -> torch.Tensor | None:
        """Return the sketch of a full gradient, of this rank's part and of those of others that it lacks."""
        near = sorted(self._ranks, key=lambda other: abs(other.rank - rank.rank))
        parts = _parts(one.events[key] for one in near if key in one.events)
        boxes = None if parts is None else distinct(parts)
        if boxes is None:
            return None
        return torch.stack([digest(tensor, box).numbers[:K] for box, tensor in boxes.items()]).sum(0)

    def _groups(self, rank: OfRank) -> dict[str, list[int]]:
        """The data ranks that share each single dimension of the data with a rank."""
        dims = [(name, size) for name, size in self._request.mesh if name in self._request.data_dims]
        found, stride = {}, self._request.data_size
        for name, size in dims:
            stride //= size
            at = rank.data_rank // stride % size
            found[name] = [rank.data_rank + (other - at) * stride for other in range(size)]
        return found if len(dims) > 1 else {}

    def _named(self, factor: float) -> tuple[float, str]:
        """Return a factor and its name; one that is a size or one divided by a size is exactly that."""
        for value, before in ((factor, ""), (1 / factor if factor else 0.0, "1 / ")):
            fits = [name for name, size in self._request.mesh if size > 1 and abs(value - size) <= self._near * size]
            if abs(value - 1) <= self._near:
                return 1.0, "1"
            if fits:
                size = float(dict(self._request.mesh)[fits[0]])
                return 1 / size if before else size, f"{before}the size of {' or '.join(fits)}"
        sizes = products(dict(self._request.mesh)) | {"the number of microbatches": float(self._counts[0])}
        return float(f"{factor:.6g}"), name_of_factor(factor, sizes, spread=self._near)

    # Access ---------------------------------------------------------------------------------

    def _events(self, stage: Stage) -> Iterator[tuple[OfRank, Observed]]:
        for rank in self._ranks:
            for seen in rank.events.values():
                if seen.stage == stage:
                    yield rank, seen

    def _there(self, key: Key, rank: OfRank) -> Key:
        """Return the key of the same microbatch in the reference."""
        return (*key[:3], self._offsets[rank.data_rank] + key[3], *key[4:])

    def _pair(self, key: Key) -> tuple[torch.Tensor, torch.Tensor] | None:
        base, exact = self._baseline.tensors.get(key), self._oracle.tensors.get(key)
        return None if base is None or exact is None else (base, exact)

    def _divergent(self, stage: Stage, event: Observed, rank: int, text: str, *, name: str = "", index: int = -1,
                   box: Box | None = None) -> Divergent:  # fmt: skip
        location = _location(stage, event, self.outcome.step, rank, index, name=name, box=box)
        return Divergent(location, event.module, text)


def _location(
    stage: Stage, event: Observed, step: int, rank: int, index: int = -1, *, name: str = "", box: Box | None = None
) -> Location:
    box = box or (event.layout.box if event.layout is not None else None)
    element = None
    if box is not None and index >= 0 and box.shape:
        position = part_of(torch.arange(math.prod(box.shape)).view(box.shape), box).flatten()[index]
        element = tuple(int(one) for one in torch.unravel_index(position, box.shape))
    return Location(stage=stage, step=step, rank=rank, name=name or event.parameter or None, element=element)


def _middle(runs: torch.Tensor, exact: torch.Tensor) -> float:
    """The factor between two lists that the median pair has."""
    usable = exact != 0
    return float((runs[usable] / exact[usable]).median()) if bool(usable.any()) else 1.0


def _values(run: float, base: float, exact: float) -> str:
    return f"run {run:.6g}, baseline {base:.6g}, oracle {exact:.6g}"


def _once(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))
