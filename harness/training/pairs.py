"""One step of two recordings: how far apart each tensor of the run is from the reference's, and what is allowed.

Tolerances. A distance is relative to the tensor of the reference, or to what a tensor of its size has in the model on
average, if that is more: what is left where summands cancel is rounding. Allowed are 32 eps of the narrowest dtype of
the step, and in later steps a multiple of how far apart the step began; with a second recording of the reference
4 times their distance and 32 eps. Optimizers like Adam divide noise by noise: where a part ``a`` of the elements of a
gradient is noise, the update is off by ``sqrt(a)``.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.finding import Stage
from shardproof.harness.judging.signatures import fit
from shardproof.harness.tensors.pieces import index_at
from shardproof.harness.training.alignment import (
    FIELDS,
    OF_DATA,
    OF_MODULES,
    Key,
    Part,
    RecordedStep,
    components_of,
    key_of,
    name_of_seen,
    norm_of,
    values_of,
)  # fmt: skip
from shardproof.harness.training.findings import listed
from shardproof.harness.training.recording import RecordedEvent
from shardproof.harness.training.reduction import is_scaled
from shardproof.harness.watching.records import Gradient

_BEFORE_REDUCTION = (Stage.LOSS, Stage.OWN_GRADIENT, Stage.OUTPUT_GRADIENT)

#: What the tensor of a stage is called; others have the stage's name.
_WORDS = {
    Stage.MODULE_OUTPUT: "output", Stage.OUTPUT_GRADIENT: "gradient of the output",
    Stage.CLIPPED_GRADIENT: "gradient at the optimizer's step",
}  # fmt: skip


@dataclasses.dataclass
class Judged:
    """An event of the run that was compared: its distance, and what is allowed."""

    seen: RecordedEvent
    distance: float
    allowed: float

    @property
    def is_too_far(self) -> bool:
        """Whether it diverges."""
        return not self.distance <= self.allowed


def what(stage: Stage, name: str) -> str:
    """Return a tensor in words."""
    owner, _, key = name.partition(":")
    text = key or _WORDS.get(stage, stage.value)
    return f"{text} of {owner!r}" if owner else f"{text} of the model" if stage in OF_MODULES else text


class Pair:
    """One step of the reference and of the run."""

    def __init__(
        self,
        ref: RecordedStep,
        run: RecordedStep,
        noise: Mapping[tuple[int, Key], float] | None,
        earlier: Sequence["Pair"],
    ):
        self.ref, self.run, self.earlier, self._noise = ref, run, [*earlier], noise
        self.step = run.evidence.step
        self.components = components_of(ref, run)
        self.of_run = {part: own for own in self.components for part in own[1]}
        self.eps = max(ref.eps, run.eps)
        self.is_adjacent = bool(earlier) and earlier[-1].step == self.step - 1
        self._distances: dict[tuple[int, str, str], float | None] = {}
        self._sums: dict[tuple[Key, int], float | None] = {}
        self.skipped: dict[str, set[str]] = {}

    def slack(self) -> float:
        """What is allowed in a step that begins with equal parameters."""
        return numerics.RUNS_EPS * self.eps

    @functools.cached_property
    def allowed(self) -> float:
        """What is allowed in this step."""
        begins = [0.0]
        for name in self.names("initial") if self.is_adjacent else ():
            distance = self.reduced(0, "initial", name)
            if distance is not None and distance <= self._allowed_at_start(name) and not self.is_noise(name):
                begins.append(distance)
        return self.slack() + numerics.GROWTH * max(begins)

    def _allowed_at_start(self, name: str) -> float:
        before = self.earlier[-1].worst("after", name) if self.is_adjacent else None
        return max(self.slack(), 2 * (before or 0.0))

    def names(self, field: str) -> list[str]:
        return [name for of, name in self.run.first if of == field]

    def is_noise(self, name: str) -> bool:
        """Whether the gradient of a parameter, or a part of it, is rounding noise in this step or an earlier one."""
        return any(one._is_noise_here(name) for one in (self, *reversed(self.earlier)))

    def _is_noise_here(self, name: str) -> bool:
        vector, floor = self.ref.first.get(("at_step", name)), self.ref.floor("at_step", name)
        in_eps, most = numerics.NOISE_OF_AVERAGE
        own = vector is not None and float(vector.norm()) < min(in_eps * self.eps, most) * floor
        return own or name in self.ref.noisy

    def reduced(self, rank: int, field: str, name: str) -> float | None:
        """Return the distance of an assembled tensor as a rank of the run has it; None if it cannot be told."""
        key = (rank, field, name)
        if key not in self._distances:
            self._distances[key] = self._reduced(rank, field, name)
        return self._distances[key]

    def expected(self, rank: int, field: str, name: str) -> torch.Tensor | None:
        """Return the reference's tensor: of the same rank, if both have equally many, else of the first that has it.

        Ranks may have tensors of one name that differ, such as experts.
        """
        found = self.ref.vector(rank, field, name) if len(self.ref.seen) == len(self.run.seen) else None
        return self.ref.first.get((field, name)) if found is None else found

    def _reduced(self, rank: int, field: str, name: str) -> float | None:
        mine, other = self.run.vector(rank, field, name), self.expected(rank, field, name)
        if mine is None or other is None or self.run.shape(field, name) != self.ref.shape(field, name):
            return None
        return _distance(mine, other, self.ref.floor(field, name))

    @functools.cached_property
    def factor(self) -> float:
        """By what the run's own gradients are multiplied to be the reference's: one number for all microbatches."""
        fits = [one for one in self.factors if one is not None]
        if fits:
            return statistics.median(fits)
        key = (Stage.LOSS, "", "", 0)
        sums = [(self.ref.data(key, a), self.run.data(key, b)) for a, b in self.components]
        known = [(float(a[0]), float(b[0])) for a, b in sums if a is not None and b is not None]
        whole = sum(b for _, b in known)
        return sum(a for a, _ in known) / whole if whole else 1.0

    @functools.cached_property
    def factors(self) -> list[float | None]:
        """By component, the factor of its own gradients; None where none fits."""
        found: list[float | None] = []
        for a, b in self.components:
            mine, other = self.stacked(self.run, b), self.stacked(self.ref, a)
            factor, residual = (0.0, 1.0) if mine is None or other is None else fit(other, mine)
            found.append(factor if residual <= 8 * self.allowed and factor else None)
        return found

    def stacked(self, step: RecordedStep, parts: Sequence[Part]) -> torch.Tensor | None:
        """Return the own gradients of all parameters in one vector."""
        found = [step.own(name, parts) for name in self.own_names]
        if not found or any(one is None for one in found):
            return None
        return torch.cat([one for one in found if one is not None])

    @functools.cached_property
    def own_names(self) -> list[str]:
        """The parameters whose own gradients both have, of one shape."""
        of_ref = {name for one in self.ref.gradients for name in one.own}
        mine = dict.fromkeys(name for one in self.run.gradients for name in one.own)
        return [
            name
            for name in mine
            if name in of_ref and self._own_shape(self.ref, name) == self._own_shape(self.run, name)
        ]

    def _own_shape(self, step: RecordedStep, name: str) -> tuple[int, ...]:
        return next(one.own[name][0][1].box.shape for one in step.gradients if name in one.own)

    def judge(self, rank: int, only: Collection[Stage] = tuple(Stage)) -> list[Judged]:
        """Return what was compared of a rank in some stages, in execution order."""
        found = []
        for seen in self.run.seen[rank]:
            one = self._judge(rank, seen) if seen.stage in only else None
            if one is not None:
                found.append(one)
        return found

    def _judge(self, rank: int, seen: RecordedEvent) -> Judged | None:
        if seen.stage is Stage.INPUT:
            return None
        if seen.stage is Stage.TOTAL_NORM:
            return self._judge_norm(rank, seen)
        if seen.stage in OF_DATA:
            return self._judge_data(rank, seen)
        field, name = FIELDS[seen.stage], name_of_seen(seen)
        distance = self.reduced(rank, field, name)
        if distance is None:
            return self._skip(seen, field, name)
        allowed = self._allow(seen)
        both = ((self.run.evidence, rank), (self.ref.evidence, self.peer(rank)))
        if seen.stage is Stage.GRADIENT and not all(is_scaled(one, name, at, allowed) for one, at in both):
            # As where user code reduces by hand.
            self._note("gradient after backward: user code does more than scale it before the step", name)
            return None
        if seen.stage in (Stage.PARAMETER, Stage.OPTIMIZER_STATE) and self.is_noise(seen.parameter):
            self._note("parameters whose gradients are rounding noise, or a part of them", seen.parameter)
            return None
        return Judged(seen, distance, allowed)

    def _allow(self, seen: RecordedEvent) -> float:
        name, allowed = name_of_seen(seen), self.allowed
        if self._noise is not None:
            return numerics.RUNS_FACTOR * self._noise.get((self.step, key_of(seen)), 0.0) + self.slack()
        if seen.stage is Stage.INITIAL:
            allowed = self._allowed_at_start(name)
        elif seen.stage is Stage.OPTIMIZER_STATE:
            allowed *= 4
        elif seen.stage is Stage.PARAMETER:
            start, end = (self.ref.first.get((field, name)) for field in ("initial", "after"))
            if start is not None and end is not None:
                size = max(float(end.norm()), self.ref.floor("after", name))
                update = float((end - start).norm()) / size if size else 0.0
                begins = self.worst("initial", name) or 0.0
                allowed = max(allowed, math.sqrt(self.allowed) * update + 2 * begins)
        return allowed

    def worst(self, field: str, name: str) -> float | None:
        """Return the largest distance of a tensor on any rank."""
        key = (-1, field, name)
        if key not in self._distances:
            found = (self.reduced(rank, field, name) for rank in range(len(self.run.seen)))
            self._distances[key] = max((one for one in found if one is not None), default=None)
        return self._distances[key]

    def _judge_norm(self, rank: int, seen: RecordedEvent) -> Judged | None:
        mine, other = norm_of(self.run, rank, seen), norm_of(self.ref, self.peer(rank), seen)
        if mine is None or other is None:
            return None
        distance = abs(mine - other) / abs(other) if other else math.inf if mine else 0.0
        return Judged(seen, distance, self._allow(seen))

    def _judge_data(self, rank: int, seen: RecordedEvent) -> Judged | None:
        component = self.of_run.get((rank, seen.microbatch))
        if component is None:
            return self._skip(seen, "data", seen.parameter or seen.module)
        known = (key_of(seen), id(component))
        if known not in self._sums:
            self._sums[known] = self._distance_of_sums(key_of(seen), *component)
        distance = self._sums[known]
        if distance is None:
            return self._skip(seen, "data", seen.parameter or seen.module)
        return Judged(seen, distance, self._allow(seen))

    def _distance_of_sums(self, key: Key, of_ref: Sequence[Part], of_run: Sequence[Part]) -> float | None:
        stage, name, floor = key[0], key[1], 0.0
        if stage is Stage.OWN_GRADIENT:
            if name not in self.own_names:
                return None
            mine, other = self.run.own(name, of_run), self.ref.own(name, of_ref)
            floor = self._own_floor(name, of_ref)
        elif stage is Stage.LOSS or self._are_alike(key, of_ref, of_run):
            mine, other = self.run.data(key, of_run), self.ref.data(key, of_ref)
        else:
            return None
        if mine is None or other is None:
            return None
        return _distance(mine * (self.factor if stage in _BEFORE_REDUCTION else 1.0), other, floor)

    def _own_floor(self, name: str, parts: Sequence[Part]) -> float:
        whole = self.stacked(self.ref, parts)
        numel = sum(math.prod(self._own_shape(self.ref, one)) for one in self.own_names)
        average = float(whole.norm()) / math.sqrt(max(1, numel)) if whole is not None else 0.0
        return average * math.sqrt(math.prod(self._own_shape(self.ref, name)))

    def _are_alike(self, key: Key, of_ref: Sequence[Part], of_run: Sequence[Part]) -> bool:
        """Whether outputs of two sets of microbatches can be compared: by rows, or because each set has one."""
        sides = [_outputs(self.ref, key, of_ref), _outputs(self.run, key, of_run)]
        if not all(sides):
            return False
        found = [one for side in sides if side is not None for one in side]
        rows = {(one.shape[1:], one.shape[0] // count) for one, count in found if one.by_rows}
        boxes = {one.box for one, _ in found if not one.by_rows}
        if rows and boxes:
            return False
        return len(rows) == 1 or (len(found) == 2 and len(boxes) == 1 and next(iter(boxes)).is_full)

    def _skip(self, seen: RecordedEvent, field: str, name: str) -> Judged | None:
        reason = "the reference has none, or of another shape"
        if field in FIELDS.values() and (field, name) in self.ref.first and self.ref.first[field, name] is not None:
            whole = math.prod(self.run.shape(field, name))
            held = sum(box.numel for box in {one.box for one in self._held(field, name)})
            if seen.layout is None:
                reason = "their layout is not known; pass layout= to record"
            elif held < whole:
                reason = f"{whole - held:,} of {whole:,} elements are on no rank"
        elif field == "data":
            reason = "ranks have other parts of it, or the reference has none"
        self._note(f"{_WORDS.get(seen.stage, seen.stage.value)}: {reason}", name or "the model")
        return None

    def _held(self, field: str, name: str) -> Iterator[Gradient]:
        for one in self.run.gradients:
            if name in getattr(one, field):
                yield getattr(one, field)[name]

    def _note(self, reason: str, name: str) -> None:
        self.skipped.setdefault(reason, set()).add(name)

    # What later stages show

    def settle(self, judged: Sequence[list[Judged]]) -> list[str]:
        """Take back what later stages of the step show to be meant; return notes."""
        if self._noise is not None:
            return []  # tolerances are those of a second run
        flat = [one for own in judged for one in own]
        at_step = [one for one in flat if one.seen.stage is Stage.CLIPPED_GRADIENT]
        if at_step and not any(one.is_too_far for one in at_step):
            return self._settle_before_reduction(flat)
        if self.scaled_since is not None:
            # The optimizer's step decides: what is scaled since backward is told of gradients as it gets them.
            _allow_all(one for one in flat if one.seen.stage in (Stage.GRADIENT, Stage.TOTAL_NORM))
        return []

    def _settle_before_reduction(self, flat: Sequence[Judged]) -> list[str]:
        """Take back what differs before the reduction, as the gradients that the optimizer gets agree."""
        # A norm by which gradients are clipped takes a factor out of them, and shows it.
        if any(one.seen.stage is Stage.TOTAL_NORM and one.is_too_far for one in flat):
            return []
        meant = [one for one in flat if one.is_too_far and one.seen.stage in (*OF_DATA, Stage.GRADIENT)]
        _allow_all(meant)
        names = sorted({one.seen.parameter or one.seen.module or one.seen.stage.value for one in meant})
        text = f"step {self.step}: {listed(names)} differ before the reduction, and the gradients agree"
        return [text] if meant else []

    @functools.cached_property
    def scaled_since(self) -> tuple[float, float] | None:
        """The factors that all gradients have after backward and at the step, if user code scales in between by more.

        Where a norm is known, clipping may be what scales: then they are told of gradients after backward.
        """
        if any(seen.stage is Stage.TOTAL_NORM for seen in self.run.seen[0]):
            return None
        back, last = self._common_factor("after_backward"), self._common_factor("at_step")
        if back is None or last is None or abs(back - last) <= self._near * abs(back):
            return None
        return back, last

    @property
    def _near(self) -> float:
        """Within which two factors are one, relative to it."""
        return max(numerics.NAMED_FACTOR, 4 * self.allowed)

    def _common_factor(self, field: str) -> float | None:
        """By what all gradients of the first rank are the reference's; None without one factor."""
        found = []
        for name in self.names(field):
            mine, other = self.run.vector(0, field, name), self.expected(0, field, name)
            factor, rest = fit(mine, other) if mine is not None and other is not None else (0.0, 1.0)
            if self.is_noise(name):
                continue
            if rest > 4 * self.allowed:
                return None
            found.append(factor)
        middle = statistics.median(found) if found else 0.0
        return middle if middle and all(abs(one - middle) <= self._near * abs(middle) for one in found) else None

    def peer(self, rank: int) -> int:
        """Return the rank of the reference with which a rank is compared."""
        return rank if len(self.ref.seen) == len(self.run.seen) else 0

    def without_gradient(self, rank: int) -> list[str]:
        """Return the parameters with a gradient in the reference when the optimizer steps, and none on this rank."""
        mine, other = self.run.gradients[rank], self.ref.gradients[self.peer(rank)]
        known = mine.own.keys() | mine.after_backward.keys() | mine.initial.keys()
        return [name for name in other.at_step if name in known and name not in mine.at_step]

    def missing(self, rank: int) -> str:
        """Say which parameters have a gradient in the reference when the optimizer steps, and on this rank none."""
        names = self.without_gradient(rank)
        if not names:
            return ""
        if not set(names) & self.run.gradients[rank].initial.keys():
            return f"no optimizer steps {listed(names)} [{codes.UNMOVED}]"
        have = "has" if len(names) == 1 else "have"
        return f"{listed(names)} {have} no gradient when the optimizer steps [{codes.MISSING}]"

    def scale(self, rank: int, seen: RecordedEvent) -> float:
        """By what the distance to a small tensor is more, if it is relative to the tensor itself."""
        if seen.stage is Stage.OWN_GRADIENT:
            parts = self.of_run[rank, seen.microbatch][0]
            other, floor = self.ref.own(seen.parameter, parts), self._own_floor(seen.parameter, parts)
        elif seen.stage in FIELDS:
            key = (FIELDS[seen.stage], name_of_seen(seen))
            other, floor = self.expected(rank, *key), self.ref.floor(*key)
        else:
            return 1.0
        size = float(other.norm()) if other is not None else 0.0
        return max(1.0, floor / size) if size else 1.0

    def element(self, rank: int, seen: RecordedEvent) -> tuple[tuple[int, ...], float, float] | None:
        """Return the element that differs most, if both have the values, and what both have there."""
        mine, other = (values_of(side, own, seen) for side, own in ((self.run, rank), (self.ref, self.peer(rank))))
        if mine is None or other is None or mine.shape != other.shape or not mine.numel():
            return None
        at = int((mine - other).abs().nan_to_num(nan=math.inf).argmax())
        return index_at(at, mine.shape), float(other.flatten()[at]), float(mine.flatten()[at])


def _outputs(side: RecordedStep, key: Key, parts: Sequence[Part]) -> list[tuple[RecordedEvent, int]] | None:
    """Return the outputs of microbatches, each data rank's once, with their rows; None if one lacks, or its rows."""
    found = []
    for part in parts:
        if side.readers[part[0]] != part[0]:
            continue
        one = side.by_key.get(key, {}).get(part)
        if one is None or (one.by_rows and part not in side.rows):
            return None
        found.append((one, len(side.rows[part]) if one.by_rows else 0))
    return found


def _allow_all(judged: Iterable[Judged]) -> None:
    for one in judged:
        one.allowed = math.inf


def _distance(mine: torch.Tensor, other: torch.Tensor, floor: float) -> float:
    if not bool(other.isfinite().all()):
        return 0.0 if not bool(mine.isfinite().all()) else math.inf
    size = max(float(other.norm()), floor)
    difference = float((mine - other).norm())
    return difference / size if size else math.inf if difference else 0.0
