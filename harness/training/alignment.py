"""One step of a recording as a whole: assembled from its ranks, and cut into microbatches that read the same rows."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import torch

from shardproof.door import BadFile
from shardproof.harness.judging import numerics
from shardproof.harness.judging.finding import Stage
from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.training.evidence import Evidence, Start
from shardproof.harness.training.recording import Recorded, RecordedEvent
from shardproof.harness.watching.assembly import Held, full_tensor
from shardproof.harness.watching.records import ForwardRecord, Gradient, GradientRecord, Inputs, Parameter, StepRecord

#: Where a record has what was assembled from several ranks, by stage.
FIELDS = {
    Stage.INITIAL: "initial", Stage.GRADIENT: "after_backward", Stage.CLIPPED_GRADIENT: "at_step",
    Stage.PARAMETER: "after", Stage.OPTIMIZER_STATE: "state",
}  # fmt: skip
OF_DATA = (Stage.LOSS, Stage.OWN_GRADIENT, Stage.MODULE_OUTPUT, Stage.OUTPUT_GRADIENT)
OF_MODULES = (Stage.MODULE_OUTPUT, Stage.OUTPUT_GRADIENT)

Part = tuple[int, int]
"""A microbatch: a rank and the number of its forward."""

Key = tuple[Stage, str, str, int]
"""A tensor, in whatever microbatches and on whatever ranks: stage, name, key of state, number."""


@dataclasses.dataclass
class StepTensors(GradientRecord):
    """The tensors of a step that ranks have parts of: gradients, parameters before and after it, and states."""

    initial: dict[str, Gradient] = dataclasses.field(default_factory=dict)
    after: dict[str, Gradient] = dataclasses.field(default_factory=dict)
    state: dict[str, Gradient] = dataclasses.field(default_factory=dict)


#: For each parameter's own gradients there is a list with a place for each microbatch, of each rank. So many places are
#: there at least, and 64 times as many as gradients.
_MOST_PLACES = 1 << 22


def _are_few(gradients: Sequence[StepTensors], records: Sequence[StepRecord]) -> bool:
    """Whether there are far fewer own gradients than places for them."""
    names = {name for one in gradients for name in one.own}
    places = max(1, len(names)) * len(records) * max(max(one.backwards, one.forwards.count) for one in records)
    return places > _MOST_PLACES + 64 * sum(len(parts) for one in gradients for parts in one.own.values())


class RecordedStep:
    """One step of a recording."""

    def __init__(self, recorded: Recorded, step: int) -> None:
        self.recorded = recorded
        # What the step begins with comes first: parameters are read when the optimizer steps.
        self.seen = [sorted(one.events[step], key=lambda e: e.stage is not Stage.INITIAL) for one in recorded.ranks]
        every = [(rank, one) for rank, seen in enumerate(self.seen) for one in seen]
        self.rows = {(rank, one.microbatch): one.rows for rank, one in every if one.rows}
        self.gradients = [_tensors_of(seen) for seen in self.seen]
        records = [_record(rank, step, seen, self.gradients[rank]) for rank, seen in enumerate(self.seen)]
        starts = [Start(one.groups, {}, (), recorded.head.model, {}, {}) for one in recorded.ranks]
        self.evidence = Evidence(records, starts, {})
        if _are_few(self.gradients, records):
            raise BadFile(f"{recorded.path}: step {step} has few gradients for the numbers of its microbatches")
        self.readers = {rank: ranks[0] for ranks in self.evidence.readers for rank in ranks}
        #: Parameters of whose gradients some elements are rounding noise.
        self.noisy = {one.parameter for _, one in every if one.noise}
        self.by_key = _by_key(every)

    @functools.cached_property
    def eps(self) -> float:
        """The spacing at 1 of the narrowest dtype."""
        dtypes = {
            one.dtype for seen in self.seen for one in seen if one.stage not in (Stage.INPUT, Stage.OPTIMIZER_STATE)
        }
        dtypes |= {name for one in self.recorded.ranks for name in one.autocast}
        return max((numerics.EPS.get(dtype, 2.0**-7) for dtype in dtypes), default=2.0**-23)

    @property
    def parts(self) -> list[Part]:
        """All microbatches."""
        counts = [max(one.backwards, one.forwards.count) for one in self.evidence.records]
        return [(rank, m) for rank, count in enumerate(counts) for m in range(count)]

    def vector(self, rank: int, field: str, name: str) -> torch.Tensor | None:
        """Return a full tensor as a rank has it; None if it has none, or parts of it are nowhere."""
        return self.evidence.assembled(name, rank, field)

    def shape(self, field: str, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor."""
        found = (getattr(one, field).get(name) for one in self.gradients)
        return next((one.box.shape for one in found if one is not None), ())

    @functools.cached_property
    def first(self) -> dict[tuple[str, str], torch.Tensor | None]:
        """By field and name, each tensor as the first rank that has it."""
        found: dict[tuple[str, str], torch.Tensor | None] = {}
        for rank, own in enumerate(self.gradients):
            for field in FIELDS.values():
                for name in getattr(own, field):
                    if found.get((field, name)) is None:
                        found[field, name] = self.vector(rank, field, name)
        return found

    def floor(self, field: str, name: str) -> float:
        """Return the length of the sketch of a tensor of this size, if it had the elements of the model's average."""
        kind = (field, name.partition(":")[2])
        return self._averages.get(kind, 0.0) * math.sqrt(math.prod(self.shape(field, name)))

    @functools.cached_property
    def _averages(self) -> dict[tuple[str, str], float]:
        sums: dict[tuple[str, str], list[float]] = {}
        for (field, name), vector in self.first.items():
            if vector is not None and bool(vector.isfinite().all()):
                own = sums.setdefault((field, name.partition(":")[2]), [0.0, 0.0])
                own[0] += float(vector.square().sum())
                own[1] += math.prod(self.shape(field, name))
        return {kind: math.sqrt(squares / numel) for kind, (squares, numel) in sums.items() if numel}

    def own(self, name: str, parts: Iterable[Part]) -> torch.Tensor | None:
        """Return the sum of a parameter's own gradients over microbatches; None if there are none."""
        own = self.evidence.own(name)
        found = [own[rank][m] for rank, m in parts if rank in own and m < len(own[rank])]
        return torch.stack(found).sum(0) if found else None

    def data(self, key: Key, parts: Iterable[Part]) -> torch.Tensor | None:
        """Return the sum of losses or outputs over microbatches, of ranks that read the same one; None if one lacks."""
        found = []
        for rank, m in parts:
            if self.readers[rank] == rank:
                one = self.by_key.get(key, {}).get((rank, m))
                if one is None:
                    return None
                found.append(one.value.vector)
        return torch.stack(found).sum(0) if found else None


def name_of_seen(seen: RecordedEvent) -> str:
    """Return the name of a tensor of a parameter: that of the parameter, and the key of a state behind a colon."""
    return f"{seen.parameter}:{seen.state}" if seen.state else seen.parameter


def key_of(seen: RecordedEvent) -> Key:
    """Return what a tensor is in whatever microbatch."""
    # A module that is called twice in a microbatch has two outputs.
    number = seen.call * 1000 + seen.index if seen.stage not in (Stage.OWN_GRADIENT, Stage.LOSS) else seen.index
    return seen.stage, seen.parameter or seen.module, seen.state, number


def _by_key(every: Iterable[tuple[int, RecordedEvent]]) -> dict[Key, dict[Part, RecordedEvent]]:
    """Return what ranks have recorded of single microbatches."""
    found: dict[Key, dict[Part, RecordedEvent]] = {}
    for rank, one in every:
        if one.stage in OF_DATA:
            found.setdefault(key_of(one), {})[rank, one.microbatch] = one
    return found


def _tensors_of(seen: Sequence[RecordedEvent]) -> StepTensors:
    """Return the parts of tensors that a rank has recorded."""
    made = StepTensors()
    for one in seen:
        if one.layout is None:
            continue
        gradient = Gradient(one.box, one.layout.pending, one.value, one.dtype)
        if one.stage is Stage.OWN_GRADIENT:
            made.own.setdefault(one.parameter, []).append((one.microbatch, gradient))
        elif one.stage in FIELDS:
            getattr(made, FIELDS[one.stage])[name_of_seen(one)] = gradient
    return made


def _record(rank: int, step: int, seen: Sequence[RecordedEvent], tensors: StepTensors) -> StepRecord:
    inputs: dict[int, list[tuple[int, ...]]] = {}
    parameters: dict[str, Parameter] = {}
    for one in seen:
        if one.stage is Stage.INPUT:
            inputs.setdefault(one.microbatch, []).append(one.value.bits)
        elif one.layout is not None and one.stage in FIELDS:
            parameters.setdefault(name_of_seen(one), Parameter(one.box, one.layout.mesh, True, one.dtype))
    batches = [Inputs(hash(tuple(own))) for own in inputs.values()]
    backwards = max((number + 1 for parts in tensors.own.values() for number, _ in parts), default=0)
    return StepRecord(rank, step, backwards, ForwardRecord(len(inputs), batches), tensors, parameters)


def components_of(ref: RecordedStep, run: RecordedStep) -> list[tuple[list[Part], list[Part]]]:
    """Return the sets of microbatches of both that no row connects to others; one set where rows are not known."""
    sides = (ref, run)
    parts = [side.parts for side in sides]
    if any(part not in side.rows for side, own in zip(sides, parts, strict=True) for part in own):
        return [(parts[0], parts[1])]
    root: dict[object, object] = {}

    def find(one: object) -> object:
        while root.setdefault(one, one) != one:
            root[one] = root[root[one]]
            one = root[one]
        return one

    for number, side in enumerate(sides):
        for part in parts[number]:
            for row in side.rows[part]:
                root[find((number, part))] = find(row)
    found: dict[object, tuple[list[Part], list[Part]]] = {}
    for number in (0, 1):
        for part in parts[number]:
            found.setdefault(find((number, part)), ([], []))[number].append(part)
    return list(found.values())


def norm_of(step: RecordedStep, rank: int, seen: RecordedEvent) -> float | None:
    """Return a total norm: of one that is still to be made over ranks, what it will be."""
    found = [[one for one in own if one.stage is Stage.TOTAL_NORM and one.call == seen.call] for own in step.seen]
    if not found[rank]:
        return None
    mine = found[rank][0]
    pending = mine.layout.pending if mine.layout is not None else ()
    values = [found[one][0].value.sketch[0] for one in pending or (rank,) if found[one]]
    return math.sqrt(sum(value * value for value in values)) if pending else values[0]


def values_of(step: RecordedStep, rank: int, seen: RecordedEvent) -> torch.Tensor | None:
    """Assemble a full tensor from the values that ranks have recorded, in float64; None if some are missing."""
    parts: dict[Box, Held] = {}
    for own in [rank, *(one for one in range(len(step.seen)) if one != rank)]:
        for one in step.seen[own]:
            if (
                (one.stage, name_of_seen(one)) != (seen.stage, name_of_seen(seen))
                or one.layout is None
                or one.box in parts
                or not one.box.numel
            ):
                continue
            value = step.recorded.ranks[own].value(one)
            if value is None or one.layout.pending:
                return None
            parts[one.box] = Held(own, one.layout, value)
    return full_tensor(parts.values(), torch.float64) if len({box.shape for box in parts}) == 1 else None
