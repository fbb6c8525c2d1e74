"""Compares what the modules of two or three runs computed in one step, in the order in which they did."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from shardproof.harness.collectives.differences import lacking_collectives
from shardproof.harness.collectives.trace import Trace
from shardproof.harness.collectives.units import ROOT, UnitSize
from shardproof.harness.judging import numerics
from shardproof.harness.judging.elements import exact_difference, numbers_of
from shardproof.harness.judging.finding import Finding, Location, Numbers, Stage
from shardproof.harness.judging.numerics import Distance, distance
from shardproof.harness.parity.comparison import Context, StepComparison
from shardproof.harness.parity.explainer import ModuleFinding
from shardproof.harness.tensors.pieces import index_at
from shardproof.harness.watching.observation import Key, Observed

_FORWARD = frozenset({Stage.GATHERED, Stage.BUFFER, Stage.MODULE_OUTPUT})

_OF_PARAMETERS = frozenset({Stage.GRADIENT, Stage.CLIPPED_GRADIENT, Stage.PARAMETER, Stage.OPTIMIZER_STATE})

#: Whose statistics the oracle, which replays all ranks in one process, has and a rank has not.
_WITHOUT_ORACLE = frozenset({Stage.BUFFER})


@dataclasses.dataclass(frozen=True)
class _Aligned:
    """One tensor that modules of all runs had: events of one key, the ``position``-th of the baseline."""

    position: int
    sharded: Observed
    baseline: Observed
    oracle: Observed | None

    @property
    def is_forward(self) -> bool:
        """Whether forward made it."""
        return self.baseline.stage in _FORWARD


@dataclasses.dataclass(eq=False)
class OfStep:
    """The comparison of one step of a pair; ``comparison`` has the captured events of all runs too."""

    comparison: StepComparison
    trace: Trace
    units: Sequence[UnitSize]
    title: str = "the baseline and the float64 oracle"
    compared: int = 0
    unseen: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def in_order(self) -> Iterator[ModuleFinding]:
        """Compare tensor by tensor in the order in which a step makes them, and yield those that diverge."""
        comparison, context = self.comparison, self.comparison.context
        captured = comparison.oracle.captured
        oracle = captured[context.member] if captured else ()
        seen = aligned(comparison.sharded.captured, comparison.baseline.captured, oracle, self.unseen)
        for number in range(len(comparison.sharded.outputs)):
            of_this = [one for one in seen if one.baseline.microbatch == number]
            where = f"microbatch {number}" if number else ""
            yield from self._events((one for one in of_this if one.is_forward), (number, 0), context)
            yield from self._findings(comparison.of_microbatch(number), (number, 1), where)
            yield from self._events((one for one in of_this if not one.is_forward), (number, 2), context)
        findings = self._findings(comparison.after_backward(), (len(comparison.sharded.outputs),))
        yield from _as_backward_ran(findings, comparison.baseline.captured)

    def lacking(self, parameter: str) -> list[str]:
        """Return the collectives that the unit of a parameter lacks in this step, and the other units have."""
        unit = next((unit.label for unit in self.units if parameter in unit.names), "")
        return lacking_collectives(self.trace, unit, root=ROOT) if unit else []

    def _events(self, seen: Iterable[_Aligned], order: tuple[int, ...], context: Context) -> Iterator[ModuleFinding]:
        for one in seen:
            self.compared += 1
            if (found := _too_far(one, context)) is not None:
                yield _of_event(one, found, order)

    def _findings(
        self, findings: Iterator[Finding], order: tuple[int, ...], where: str = ""
    ) -> Iterator[ModuleFinding]:
        before = len(self.comparison.measured)
        for finding in findings:
            before = self._count(before)
            text = self._update(finding)
            yield _as_module_finding(dataclasses.replace(finding, text=finding.text + text), order, where)
        self._count(before)

    def _count(self, before: int) -> int:
        after = len(self.comparison.measured)
        self.compared += after - before
        return after

    def _update(self, finding: Finding) -> str:
        """Describe by how much each run moved an element of a parameter in this step, where that is known."""
        at, numbers = finding.location, finding.numbers
        if at.stage != Stage.PARAMETER or numbers is None or at.element is None:
            return ""
        moved = []
        captured = self.comparison.oracle.captured
        runs = {
            "sharded": self.comparison.sharded.captured,
            "baseline": self.comparison.baseline.captured,
            "oracle": captured[self.comparison.context.member] if captured else (),
        }
        for who, events in runs.items():
            found = (event for event in events if event.stage == Stage.GATHERED and event.parameter == at.name)
            event = next(found, None)
            if event is not None and len(at.element) == event.value.ndim:
                moved.append(f"{who} {numbers.values[who] - float(event.value[at.element]):.6g}")
        return f"\n  it was updated by: {', '.join(moved)}" if moved else ""


@dataclasses.dataclass(eq=False)
class Exact:
    """The comparison of one step of two runs that must have the same bits.

    ``title`` says with what the sharded run was compared, and ``findings`` makes the comparison of the pictures.
    """

    title: str
    sharded: Sequence[Observed]
    other: Sequence[Observed]
    findings: Callable[[], Iterator[Finding]]
    _: dataclasses.KW_ONLY
    rank: int
    step: int
    compared: int = 0
    unseen: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def in_order(self) -> Iterator[ModuleFinding]:
        """Compare tensor by tensor in the order in which a step makes them, and yield those that diverge."""
        for one in aligned(self.sharded, self.other, (), self.unseen):
            self.compared += 1
            if (found := self._different(one)) is not None:
                yield _of_event(one, found, (0,))
        yield from _as_backward_ran((_as_module_finding(finding, (1,)) for finding in self.findings()), self.other)

    def lacking(self, parameter: str) -> list[str]:
        """Nothing is known of the collectives of the step alone."""
        return []

    def _different(self, one: _Aligned) -> Finding | None:
        mine, other = one.sharded.value, one.baseline.value
        location = Location(stage=one.baseline.stage, step=self.step, rank=self.rank, name=one.baseline.name)
        if mine.dtype != other.dtype:
            if one.baseline.stage == Stage.BUFFER:
                return None  # when buffers are cast is an implementation's own choice
            return Finding(location, f"has dtype {mine.dtype}; the baseline has {other.dtype}")
        found = exact_difference(mine, other)
        if found is None:
            return None
        index, value, expected = found
        offset = int(torch.arange(mine.numel()).view(mine.shape)[index])
        numbers = Numbers(offset, {"sharded": value, "baseline": expected}, {})
        text = f"sharded {value:.9g}, baseline {expected:.9g}; their bits must be equal"
        return Finding(dataclasses.replace(location, element=index), text, numbers=numbers)


def aligned(
    sharded: Sequence[Observed],
    baseline: Sequence[Observed],
    oracle: Sequence[Observed],
    unseen: collections.Counter[str],
) -> list[_Aligned]:
    """Match the events of two or three runs by their keys, in the order of the baseline.

    ``unseen`` counts what the sharded run did not show, or showed in another shape or number.
    """
    mine, others, exact = (_by_key(events) for events in (sharded, baseline, oracle))
    found = []
    for position, (key, events) in enumerate(others.items()):
        own = mine.get(key, [])
        if not own:
            unseen[f"the sharded run did not show: {key[0].value}"] += 1
        elif len(own) != len(events):
            unseen[f"the sharded run showed more or fewer of it: {key[0].value}"] += 1
        elif any(one.value.shape != other.value.shape for one, other in zip(own, events, strict=True)):
            unseen[f"the sharded run has another shape, as where tensors are parallel: {key[0].value}"] += 1
        else:
            expected = exact.get(key, [])
            pairs = zip(own, events, strict=True)
            found += [
                _Aligned(position, one, other, expected[number] if number < len(expected) else None)
                for number, (one, other) in enumerate(pairs)
            ]
    return found


def _as_module_finding(finding: Finding, order: tuple[int, ...], where: str = "") -> ModuleFinding:
    """Name the part of the model to which a tensor of a step's pictures belongs."""
    stage, name = finding.location.stage, finding.location.name or ""
    order = (*order, list(Stage).index(stage))
    if stage in _OF_PARAMETERS:
        parameter = name.partition(":")[0]
        return ModuleFinding(finding, order, parameter.rpartition(".")[0] or ROOT, parameter, where)
    return ModuleFinding(finding, order, ROOT if stage in (Stage.OUTPUT, Stage.LOSS) else "", "", where)


def _of_event(one: _Aligned, finding: Finding, order: tuple[int, ...]) -> ModuleFinding:
    event = one.baseline
    return ModuleFinding(finding, (*order, one.position), event.module or ROOT, event.parameter, event.where)


def _by_key(events: Sequence[Observed]) -> dict[Key, list[Observed]]:
    found: dict[Key, list[Observed]] = {}
    for event in events:
        found.setdefault(event.key, []).append(event)
    return found


@torch.no_grad()
def _too_far(one: _Aligned, context: Context) -> Finding | None:
    """Judge a tensor as a step's pictures are judged, with the baseline for the oracle where there is none."""
    mine, other = one.sharded.value, one.baseline.value
    event = one.baseline
    location = Location(stage=event.stage, step=context.step, rank=context.rank, name=event.name)
    if mine.dtype != other.dtype:
        return Finding(location, f"has dtype {mine.dtype}; the baseline has {other.dtype}")
    exact = one.oracle.value if one.oracle is not None and event.stage not in _WITHOUT_ORACLE else None
    found = None if exact is None or exact.shape != other.shape else _distance(mine, other, exact)
    if found is None or found.baseline_ulps > numerics.BASELINE_LIMIT_ULPS:
        # Random numbers, or another order of ranks: only the baseline knows.
        exact, found = None, _distance(mine, other, other.double())
    if not found.is_too_far or found.index < 0:
        return None
    runs = {"sharded": mine, "baseline": other} | ({} if exact is None else {"oracle": exact})
    text, numbers = numbers_of(found, runs)
    location = dataclasses.replace(location, element=index_at(found.index, other.shape))
    return Finding(location, text, numbers=numbers)


def _distance(mine: torch.Tensor, other: torch.Tensor, exact: torch.Tensor) -> Distance:
    magnitude = float(exact.abs().max()) if exact.numel() else 0.0
    magnitude = magnitude if math.isfinite(magnitude) else 1.0
    return distance(mine, other, exact, magnitude=magnitude)


def _as_backward_ran(findings: Iterator[ModuleFinding], events: Sequence[Observed]) -> Iterator[ModuleFinding]:
    """Sort the gradients that diverge as backward made them; their comparison goes by name."""
    made: dict[str, int] = {}
    for event in events:
        if event.stage == Stage.OWN_GRADIENT:
            made.setdefault(event.parameter, len(made))
    for stage, group in itertools.groupby(findings, key=lambda one: one.finding.location.stage):
        if stage != Stage.GRADIENT:
            yield from group
        else:
            ordered = [
                dataclasses.replace(one, order=(*one.order, made.get(one.parameter, len(made)))) for one in group
            ]
            yield from sorted(ordered, key=lambda one: one.order)
