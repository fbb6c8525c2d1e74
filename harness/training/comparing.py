"""Where do two recordings first diverge? Offline, whatever the worlds, meshes and accumulation of their runs.

Parameters, their gradients and states are assembled from the digests of all ranks, by name and step. What depends on
data (losses, gradients before their reduction, outputs of modules) is compared as sums over microbatches that read the
same rows: two sets of microbatches, one of each recording, that no row connects to others. The loss of a rank may be
any factor times the reference's, if one factor serves all microbatches of a step: the reduction makes up for it.

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
from collections.abc import Iterator, Mapping, Sequence

import torch

from shardproof.door import BadFile, printable
from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.finding import Stage
from shardproof.harness.judging.signatures import diagnose, fit, name_of_factor, total
from shardproof.harness.judging.texts import rank_count, ranks_of
from shardproof.harness.training.alignment import (
    FIELDS,
    OF_DATA,
    OF_MODULES,
    Key,
    Part,
    Step,
    components_of,
    key_of,
    name_of_seen,
    norm_of,
    values_of,
)  # fmt: skip
from shardproof.harness.training.evidence import vector_of
from shardproof.harness.training.findings import launched, listed
from shardproof.harness.training.recording import OfRank, Recorded, Seen
from shardproof.harness.training.reduction import is_scaled
from shardproof.harness.watching.records import Gradient

_BEFORE_REDUCTION = (Stage.LOSS, Stage.OWN_GRADIENT, Stage.OUTPUT_GRADIENT)

# Judging a step -----------------------------------------------------------------------------


@dataclasses.dataclass
class Judged:
    """An event of the run that was compared: its distance, and what is allowed."""

    seen: Seen
    distance: float
    allowed: float

    @property
    def is_too_far(self) -> bool:
        """Whether it diverges."""
        return not self.distance <= self.allowed


@dataclasses.dataclass
class Divergent:
    """The first event of a rank that diverges.

    Attributes:
        number: how many events of the rank were compared before it.
        largest: the largest distance among these.
        before: the last of them, and its distance.
        lines: what the tensor is, with the signature of a known mistake.
        element: with values, the index in the full tensor and what the reference and the run have there.
    """

    rank: int
    step: int
    stage: Stage
    name: str
    n: int
    number: int
    largest: float
    distance: float
    allowed: float
    before: tuple[str, float] | None
    lines: list[str]
    element: tuple[tuple[int, ...], float, float] | None = None

    @property
    def what(self) -> str:
        """The tensor in words."""
        return _what(self.stage, self.name)


#: What the tensor of a stage is called; others have the stage's name.
_WORDS = {
    Stage.MODULE_OUTPUT: "output", Stage.OUTPUT_GRADIENT: "gradient of the output",
    Stage.CLIPPED_GRADIENT: "gradient at the optimizer's step",
}  # fmt: skip


def _what(stage: Stage, name: str) -> str:
    owner, _, key = name.partition(":")
    text = key or _WORDS.get(stage, stage.value)
    return f"{text} of {owner!r}" if owner else f"{text} of the model" if stage in OF_MODULES else text


class _Pair:
    """One step of the reference and of the run."""

    def __init__(self, ref: Step, run: Step, noise: Mapping[tuple[int, Key], float] | None, earlier: Sequence["_Pair"]):
        self.ref, self.run, self.earlier, self._noise = ref, run, [*earlier], noise
        self.step = run.evidence.step
        self.components = components_of(ref, run)
        self._of_run = {part: own for own in self.components for part in own[1]}
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
        for name in self._names("initial") if self.is_adjacent else ():
            distance = self.reduced(0, "initial", name)
            if distance is not None and distance <= self._allowed_at_start(name) and not self.is_noise(name):
                begins.append(distance)
        return self.slack() + numerics.GROWTH * max(begins)

    def _allowed_at_start(self, name: str) -> float:
        before = self.earlier[-1].worst("after", name) if self.is_adjacent else None
        return max(self.slack(), 2 * (before or 0.0))

    def _names(self, field: str) -> list[str]:
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
        fits = [one for one in self._factors if one is not None]
        if fits:
            return statistics.median(fits)
        key = (Stage.LOSS, "", "", 0)
        sums = [(self.ref.data(key, a), self.run.data(key, b)) for a, b in self.components]
        known = [(float(a[0]), float(b[0])) for a, b in sums if a is not None and b is not None]
        whole = sum(b for _, b in known)
        return sum(a for a, _ in known) / whole if whole else 1.0

    @functools.cached_property
    def _factors(self) -> list[float | None]:
        """By component, the factor of its own gradients; None where none fits."""
        found: list[float | None] = []
        for a, b in self.components:
            mine, other = self._stacked(self.run, b), self._stacked(self.ref, a)
            factor, residual = (0.0, 1.0) if mine is None or other is None else fit(other, mine)
            found.append(factor if residual <= 8 * self.allowed and factor else None)
        return found

    def _stacked(self, step: Step, parts: Sequence[Part]) -> torch.Tensor | None:
        """Return the own gradients of all parameters in one vector."""
        found = [step.own(name, parts) for name in self._own_names]
        if not found or any(one is None for one in found):
            return None
        return torch.cat([one for one in found if one is not None])

    @functools.cached_property
    def _own_names(self) -> list[str]:
        of_ref = {name for one in self.ref.evidence.records for name in one.own}
        mine = dict.fromkeys(name for one in self.run.evidence.records for name in one.own)
        return [
            name
            for name in mine
            if name in of_ref and self._own_shape(self.ref, name) == self._own_shape(self.run, name)
        ]

    def _own_shape(self, step: Step, name: str) -> tuple[int, ...]:
        return next(one.own[name][0][1].box.shape for one in step.evidence.records if name in one.own)

    def judge(self, rank: int) -> list[Judged]:
        """Return what was compared of a rank, in execution order."""
        found = []
        for seen in self.run.seen[rank]:
            one = self._judge(rank, seen)
            if one is not None:
                found.append(one)
        return found

    def _judge(self, rank: int, seen: Seen) -> Judged | None:
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
        both = ((self.run.evidence, rank), (self.ref.evidence, self._peer(rank)))
        if seen.stage is Stage.GRADIENT and not all(is_scaled(one, name, at, allowed) for one, at in both):
            # As where user code reduces by hand.
            self._note("gradient after backward: user code does more than scale it before the step", name)
            return None
        if seen.stage in (Stage.PARAMETER, Stage.OPTIMIZER_STATE) and self.is_noise(seen.parameter):
            self._note("parameters whose gradients are rounding noise, or a part of them", seen.parameter)
            return None
        return Judged(seen, distance, allowed)

    def _allow(self, seen: Seen) -> float:
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

    def _judge_norm(self, rank: int, seen: Seen) -> Judged | None:
        mine, other = norm_of(self.run, rank, seen), norm_of(self.ref, self._peer(rank), seen)
        if mine is None or other is None:
            return None
        distance = abs(mine - other) / abs(other) if other else math.inf if mine else 0.0
        return Judged(seen, distance, self._allow(seen))

    def _judge_data(self, rank: int, seen: Seen) -> Judged | None:
        component = self._of_run.get((rank, seen.microbatch))
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
            if name not in self._own_names:
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
        whole = self._stacked(self.ref, parts)
        numel = sum(math.prod(self._own_shape(self.ref, one)) for one in self._own_names)
        average = float(whole.norm()) / math.sqrt(max(1, numel)) if whole is not None else 0.0
        return average * math.sqrt(math.prod(self._own_shape(self.ref, name)))

    def _are_alike(self, key: Key, of_ref: Sequence[Part], of_run: Sequence[Part]) -> bool:
        """Whether outputs of two sets of microbatches can be compared: by rows, or because each set has one."""
        found = []
        for side, parts in ((self.ref, of_ref), (self.run, of_run)):
            mine = [part for part in parts if side.readers[part[0]] == part[0]]
            seen = [(side, part, side.by_key.get(key, {}).get(part)) for part in mine]
            if not seen or any(one is not None and one.by_rows and part not in side.rows for _, part, one in seen):
                return False
            found += seen
        by_rows = [(one.shape, len(side.rows[part])) for side, part, one in found if one is not None and one.by_rows]
        rows = {(shape[1:], shape[0] // count) for shape, count in by_rows}
        boxes = {one.box for _, _, one in found if one is not None and not one.by_rows}
        if any(one is None for _, _, one in found) or (rows and boxes):
            return False
        return len(rows) == 1 or (len(found) == 2 and len(boxes) == 1 and next(iter(boxes)).is_full)

    def _skip(self, seen: Seen, field: str, name: str) -> Judged | None:
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
        for record in self.run.evidence.records:
            if name in getattr(record, field):
                yield getattr(record, field)[name]

    def _note(self, reason: str, name: str) -> None:
        self.skipped.setdefault(reason, set()).add(name)

    # What a divergence is

    def settle(self, judged: Sequence[list[Judged]]) -> list[str]:
        """Take back what later stages of the step show to be meant; return notes."""
        notes = []
        flat = [one for own in judged for one in own]
        at_step = [one for one in flat if one.seen.stage is Stage.CLIPPED_GRADIENT]
        if at_step and not any(one.is_too_far for one in at_step):
            norms = [one for one in flat if one.seen.stage is Stage.TOTAL_NORM]
            # A norm by which gradients are clipped takes a factor out of them, and shows it.
            is_clipped = any(one.is_too_far for one in norms)
            stages = () if is_clipped else (*OF_DATA, Stage.GRADIENT)
            meant = [one for one in flat if one.is_too_far and one.seen.stage in stages]
            if meant:
                names = sorted({one.seen.parameter or one.seen.module or one.seen.stage.value for one in meant})
                notes.append(f"step {self.step}: {listed(names)} differ before the reduction, and the gradients agree")
            for one in meant:
                one.allowed = math.inf
        elif self._scaled_since is not None:
            # The optimizer's step decides: what is scaled since backward is told of gradients as it gets them.
            for one in flat:
                if one.seen.stage in (Stage.GRADIENT, Stage.TOTAL_NORM):
                    one.allowed = math.inf
        return notes

    @functools.cached_property
    def _scaled_since(self) -> tuple[float, float] | None:
        """The factors that all gradients have after backward and at the step, if user code scales in between by more.

        Where a norm is known, clipping may be what scales: then they are told of gradients after backward.
        """
        factors: dict[str, list[float]] = {"after_backward": [], "at_step": []}
        if any(seen.stage is Stage.TOTAL_NORM for seen in self.run.seen[0]):
            return None
        for field, found in factors.items():
            for name in self._names(field):
                mine, other = self.run.vector(0, field, name), self.expected(0, field, name)
                factor, rest = fit(mine, other) if mine is not None and other is not None else (0.0, 1.0)
                if self.is_noise(name):
                    continue
                if rest > 4 * self.allowed:
                    return None
                found.append(factor)
        middles = [statistics.median(found) if found else 0.0 for found in factors.values()]
        near = max(numerics.NAMED_FACTOR, 4 * self.allowed)
        for middle, found in zip(middles, factors.values(), strict=True):
            if not middle or any(abs(one - middle) > near * abs(middle) for one in found):
                return None
        return (middles[0], middles[1]) if abs(middles[0] - middles[1]) > near * abs(middles[0]) else None

    def cause(self, rank: int, far: Sequence[Judged]) -> Judged:
        """Return the first that is too far; of gradients at the step, what is not only scaled, as by a wrong norm."""
        for one in far if far[0].seen.stage is Stage.CLIPPED_GRADIENT else ():
            name = one.seen.parameter
            sides = (self.run.records[rank].at_step.get(name), self.ref.records[self._peer(rank)].at_step.get(name))
            if one.seen.stage is not Stage.CLIPPED_GRADIENT or any(part is None for part in sides):
                continue
            mine, other = (part for part in sides if part is not None)
            if mine.box == other.box and fit(vector_of(mine), vector_of(other))[1] > 4 * self.allowed:
                return one
        return far[0]

    def _peer(self, rank: int) -> int:
        return rank if len(self.ref.seen) == len(self.run.seen) else 0

    def without_gradient(self, rank: int) -> list[str]:
        """Return the parameters with a gradient in the reference when the optimizer steps, and none on this rank."""
        mine, other = self.run.records[rank], self.ref.records[self._peer(rank)]
        known = mine.own.keys() | mine.after_backward.keys() | mine.initial.keys()
        return [name for name in other.at_step if name in known and name not in mine.at_step]

    def missing(self, rank: int) -> str:
        """Say which parameters have a gradient in the reference when the optimizer steps, and on this rank none."""
        names = self.without_gradient(rank)
        if not names:
            return ""
        if not set(names) & self.run.records[rank].initial.keys():
            return f"no optimizer steps {listed(names)} [{codes.UNMOVED}]"
        have = "has" if len(names) == 1 else "have"
        return f"{listed(names)} {have} no gradient when the optimizer steps [{codes.MISSING}]"

    def explain(self, rank: int, seen: Seen) -> list[str]:
        """Return what a tensor that diverges is, in lines."""
        if seen.stage in (Stage.LOSS, Stage.OWN_GRADIENT, Stage.OUTPUT_GRADIENT):
            return self._explain_weights() or self._explain_forward()
        if seen.stage not in FIELDS:
            return []
        field, name = FIELDS[seen.stage], name_of_seen(seen)
        mine, other = self.run.vector(rank, field, name), self.expected(rank, field, name)
        assert mine is not None and other is not None
        if not bool(mine.isfinite().all()):
            return ["it is not finite"]
        if not bool(mine.any()):
            return ["it is zero, which the reference's is not"]
        if field in ("after_backward", "at_step"):
            return self._explain_gradient(rank, field, name, mine, other)
        before = self.run.vector(rank, "initial", name)
        if field == "after" and before is not None and torch.equal(before, mine):
            return [f"the optimizer has not moved it [{codes.UNMOVED}]"]
        if field == "after" and (found := self._explain_update(rank, name)):
            return found
        return self._explain_factor(rank, field, name, mine, other) or self._explain_parts(rank, field, name)

    def _explain_gradient(self, rank: int, field: str, name: str, mine: torch.Tensor, other: torch.Tensor) -> list[str]:
        evidence = self.run.evidence
        if found := self._explain_factor(rank, field, name, mine, other):
            return found
        own = evidence.own(name)
        earlier = [total(parts) for one in reversed(self.earlier) if (parts := one.run.evidence.own(name))]
        known = diagnose(mine, own, rank=rank, groups=evidence.groups_of(rank), earlier=earlier,
                         tolerance=max(evidence.tolerance(name), self.allowed)) if own else None  # fmt: skip
        if known is None:
            return self._explain_parts(rank, field, name) or ["it matches no known mistake"]
        if known.signature == codes.SCALED:
            return [f"it is {known.factor:.4g} x the sum of what all ranks computed: what they computed differs"]
        return [f"it {known.text} (c = {known.factor:.4f}) [{known.signature}]"]

    def _explain_factor(self, rank: int, field: str, name: str, mine: torch.Tensor, other: torch.Tensor) -> list[str]:
        factor, residual = fit(mine, other)
        tolerance = 4 * self.allowed
        if residual > tolerance or abs(factor - 1) <= tolerance or factor == 0:
            return []
        spread = max(numerics.NAMED_FACTOR, tolerance)
        same, count = [], 0
        for of, one in self.ref.first:
            seen = self.run.vector(rank, field, one) if of == field else None
            vector = self.expected(rank, field, one)
            if seen is None or vector is None or one.partition(":")[2] != name.partition(":")[2]:
                continue
            count += 1
            k, rest = fit(seen, vector)
            if rest <= tolerance and abs(k - factor) <= spread * abs(factor):
                same.append(one)
        what = "gradient" if field in ("after_backward", "at_step") else "tensor"
        who = f"every {what} is" if len(same) == count else f"{listed(same)} are"
        named = name_of_factor(factor, self._sizes(rank), spread=spread)
        text = f"{who} exactly {factor:.4f} x the reference's ({len(same)} of {count})"
        lines = [f"{text}: {named} [{codes.SCALED}]" if named else f"{text} [{codes.SCALED}]"]
        if field == "at_step" and self._scaled_since is not None:
            back, last = self._scaled_since
            lines.append(
                f"after backward it is {back:.4g} x: multiply it by {1 / last:.4g} before the optimizer's step"
            )
        return lines

    def _explain_update(self, rank: int, name: str) -> list[str]:
        """Say if updates by equal gradients have a factor, or differ by a part of the parameter."""
        known: dict[str, tuple[str, float]] = {}
        names = [one for one in self._names("after") if ":" not in one]
        for one in names:
            start, end = (self.run.vector(rank, field, one) for field in ("initial", "after"))
            begin, goal = (self.expected(rank, field, one) for field in ("initial", "after"))
            if start is None or end is None or begin is None or goal is None or self.is_noise(one):
                continue
            mine, other, size = end - start, goal - begin, float(goal.norm())
            least = min(float(mine.norm()), float(other.norm()))
            near = max(math.sqrt(self.allowed), 4 * self.eps * size / least) if least else math.inf
            factor, residual = fit(mine, other)
            if residual <= near < numerics.UPDATES_TELL and abs(factor - 1) > 2 * near and factor > 0:
                known[one] = ("rate", factor)
            elif near < numerics.UPDATES_TELL and residual > near:
                part, rest = fit(mine - other, begin)
                if rest * float((mine - other).norm()) <= near * float(other.norm()) and rest <= numerics.UPDATES_TELL:
                    known[one] = ("decay", part)
        if name not in known:
            return self._explain_rates(names)
        kind, factor = known[name]
        spread = numerics.UPDATES_ALIKE * abs(factor)
        same = [one for one, (of, k) in known.items() if of == kind and abs(k - factor) <= spread]
        which = "every parameter" if len(same) == len(names) else listed(same)
        if kind == "decay":
            return [f"with equal gradients, {which} moved by {factor:+.2g} x itself more than the reference's: the "
                    "weight decay differs"]  # fmt: skip
        return [
            f"with equal gradients, {which} moved {factor:.4g} times as far as the reference's: learning rates differ"
        ]

    def _explain_rates(self, names: Sequence[str]) -> list[str]:
        """Say if updates have one factor for each rank, of the parts that it holds."""
        columns, goals = [], []
        for one in names:
            records = self.run.evidence.records
            held = [tuple(getattr(record, field).get(one) for field in ("initial", "after")) for record in records]
            begin, goal = (self.expected(0, field, one) for field in ("initial", "after"))
            boxes = [end.box for _, end in held if end is not None]
            if begin is None or goal is None or len({*boxes}) < len(boxes) or len(boxes) < 2 or self.is_noise(one):
                continue
            empty = torch.zeros_like(goal)
            columns.append(torch.stack(
                [empty if start is None or end is None else vector_of(end) - vector_of(start) for start, end in held], 1
            ))  # fmt: skip
            goals.append(goal - begin)
        if not columns or len(torch.cat(goals)) < 2 * columns[0].shape[1]:
            return []
        matrix, wanted = torch.cat(columns), torch.cat(goals)
        weights = torch.linalg.lstsq(matrix, wanted[:, None]).solution.squeeze(1)
        near = 8 * math.sqrt(self.allowed)
        if not float((matrix @ weights - wanted).norm()) <= near * float(wanted.norm()) or not bool(
            (weights > 0).all()
        ):
            return []
        factors = (1 / weights).tolist()
        if max(abs(one - 1) for one in factors) <= 4 * near:
            return []
        listed_ = ", ".join(f"{one:.3g}" for one in factors[:8])
        more = f" and {len(factors) - 8} more" if len(factors) > 8 else ""
        return [f"with equal gradients, what ranks hold moved {listed_}{more} times as far as the reference's, by "
                "rank: learning rates differ"]  # fmt: skip

    def _sizes(self, rank: int) -> dict[str, float]:
        """Return the sizes of the run by name; those that are equal are one."""
        sizes = {f"the size of {name}": len(members) for name, members in self.run.evidence.groups_of(rank).items()}
        sizes["the number of ranks"] = len(self.run.seen)
        sizes["the number of microbatches"] = self.run.evidence.records[rank].backwards
        names: dict[int, list[str]] = {}
        for name, size in sizes.items():
            names.setdefault(size, []).append(name)
        return {" or ".join(own): float(size) for size, own in names.items()}

    def _explain_weights(self) -> list[str]:
        """Say whether microbatches count with other weights than in the reference."""
        weights = [1 / one if one else None for one in self._factors]
        if None in weights:
            weights = list(self._fitted())
        known = [one for one in weights if one is not None]
        if len(known) < 2 or len(known) < len(weights):
            return []
        mean = sum(known) / len(known)
        if not mean or not max(known) - min(known) > 16 * self.allowed * abs(mean):
            return []
        listed_ = ", ".join(f"{one / mean:.4g}" for one in known[:8])
        more = f" and {len(known) - 8} more" if len(known) > 8 else ""
        return [
            f"microbatches count with other weights than in the reference: {listed_}{more} times the mean "
            f"[{codes.WEIGHTED}]",
            f"next: the doctor says whether each counts alike, whatever its tokens [{codes.TOKENS}]",
            f"  {_launched(self.run.recorded, 'doctor')}",
        ]

    def _explain_forward(self) -> list[str]:
        """Say if what microbatches compute is not the reference's by any factor; losses make up for one by then."""
        if not self._own_names or any(one is not None for one in self._factors):
            return []
        text = (
            "the losses are a multiple of the reference's, and these gradients are not: the forward or the loss "
            "differs, or a part of them has no gradient in one of the two"
        )
        if any(one.stage is Stage.MODULE_OUTPUT for side in (self.ref, self.run) for one in side.seen[0]):
            return [text]
        return [
            text,
            "next: record the outputs of modules as well, and compare names the first that differs",
            f"  {_launched(self.ref.recorded, 'record --stages modules --out ref-modules')}",
            f"  {_launched(self.run.recorded, 'record --stages modules --out run-modules')}",
            "  shardproof compare ref-modules run-modules",
        ]

    def _fitted(self) -> list[float]:
        """Return the weights of the run's microbatches in what the reference computed from all of them."""
        found: list[float] = []
        for of_ref, of_run in self.components:
            other = self._stacked(self.ref, of_ref)
            columns = [one for part in of_run if (one := self._stacked(self.run, [part])) is not None]
            if other is None or not columns or len(other) < 2 * len(columns):
                return []
            matrix = torch.stack(columns, dim=1)
            if not bool(matrix.isfinite().all() and other.isfinite().all()):
                return []  # lstsq refuses them
            weights = torch.linalg.lstsq(matrix, other[:, None]).solution.squeeze(1)
            rest = float((matrix @ weights - other).norm() / other.norm())
            if not rest <= 16 * self.allowed or not bool((weights.abs() > numerics.NO_WEIGHT).all()):
                return []
            found += [1 / float(one) for one in weights]
        return found

    def _explain_parts(self, rank: int, field: str, name: str) -> list[str]:
        """Say what is told from the parts that ranks hold."""
        parts = {one.rank: getattr(one, field)[name] for one in self.run.records if name in getattr(one, field)}
        mine, factors = parts[rank], []
        if len(self.ref.seen) == len(self.run.seen):
            expected = {one.rank: getattr(one, field).get(name) for one in self.ref.records}
            for other, part in expected.items():
                if part is not None and other != rank and part.fingerprint.bits == mine.fingerprint.bits:
                    return [f"rank {rank} holds what rank {other} should [{codes.MISPLACED}]"]
            for other, part in parts.items():
                right = expected[other]
                is_alike = right is not None and right.box == part.box
                factors.append(fit(vector_of(part), vector_of(right)) if right is not None and is_alike else (0.0, 1.0))
            known = [factor for factor, rest in factors if factor]
            spread = max(known) - min(known) if known else 0.0
            if all(rest <= 4 * self.allowed for _, rest in factors) and spread > 4 * self.allowed:
                listed_ = ", ".join(f"{factor:.4g}" for factor in known[:8])
                text = f"ranks scale what they hold by factors of their own: {listed_} x the reference's"
                return [f"{text} [{codes.LOCAL_NORM}]"]
        alike = {one: other for one, other in parts.items() if other.box == mine.box and not other.pending}
        if len({other.fingerprint.identity for other in alike.values()}) > 1:
            return [f"{ranks_of(sorted(alike))} hold the same elements of it and differ [{codes.APART}]"]
        return []

    def scale(self, rank: int, seen: Seen) -> float:
        """By what the distance to a small tensor is more, if it is relative to the tensor itself."""
        if seen.stage is Stage.OWN_GRADIENT:
            parts = self._of_run[rank, seen.microbatch][0]
            other, floor = self.ref.own(seen.parameter, parts), self._own_floor(seen.parameter, parts)
        elif seen.stage in FIELDS:
            key = (FIELDS[seen.stage], name_of_seen(seen))
            other, floor = self.expected(rank, *key), self.ref.floor(*key)
        else:
            return 1.0
        size = float(other.norm()) if other is not None else 0.0
        return max(1.0, floor / size) if size else 1.0

    def element(self, rank: int, seen: Seen) -> tuple[tuple[int, ...], float, float] | None:
        """Return the element that differs most, if both have the values, and what both have there."""
        mine, other = (values_of(side, own, seen) for side, own in ((self.run, rank), (self.ref, self._peer(rank))))
        if mine is None or other is None or mine.shape != other.shape or not mine.numel():
            return None
        at = int((mine - other).abs().nan_to_num(nan=math.inf).argmax())
        index = tuple(int(one) for one in torch.unravel_index(torch.tensor(at), mine.shape))
        return index, float(other.flatten()[at]), float(mine.flatten()[at])


def _launched(recorded: Recorded, command: str) -> str:
    return launched(command, recorded.head.world, recorded.head.command)


def _distance(mine: torch.Tensor, other: torch.Tensor, floor: float) -> float:
    if not bool(other.isfinite().all()):
        return 0.0 if not bool(mine.isfinite().all()) else math.inf
    size = max(float(other.norm()), floor)
    difference = float((mine - other).norm())
    return difference / size if size else math.inf if difference else 0.0


# Comparing ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Comparison:
    """What was compared of two recordings, and where they first diverge.

    Attributes:
        compared: how many tensors.
        divergent: the first event of each rank that diverges, in the order of steps, stages and ranks.
        slack: what is allowed by the narrowest dtype alone.
        distances: the largest by step and tensor.
    """

    ref: Recorded
    run: Recorded
    steps: list[int]
    compared: int = 0
    divergent: list[Divergent] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    rows: tuple[int, int] = (0, 0)
    largest: float = 0.0
    factor: float = 1.0
    slack: float = 0.0
    distances: dict[tuple[int, Key], float] = dataclasses.field(default_factory=dict)


def compare(ref: Recorded, run: Recorded, *, noise: Recorded | None = None) -> Comparison:
    """Compare a recording with a reference.

    Args:
        noise: a second recording of the reference's run, from which tolerances are taken.

    Raises:
        BadFile: they have no step or no parameter in common, or read different data; in one line.
    """
    distances = compare(ref, noise).distances if noise is not None else None
    steps = [step for step in ref.steps if step in run.steps]
    if not steps:
        raise BadFile(f"{ref.path} has {_steps(ref.steps)} and {run.path} has {_steps(run.steps)}: none in common")
    found = Comparison(ref, run, [], notes=[*_untied(ref, run)])
    for side in (ref, run):
        found.notes += [_incomplete(side, one, steps) for one in side.ranks if not one.is_complete]
    pairs: list[_Pair] = []
    counts = [0] * len(run.ranks)
    largest = [0.0] * len(run.ranks)
    before: list[tuple[str, float] | None] = [None] * len(run.ranks)
    done: set[int] = set()
    skipped: dict[str, set[str]] = {}
    for step in steps:
        pair = _Pair(Step(ref, step), Step(run, step), distances, pairs)
        if text := _other_data(pair, ref, run):
            if not found.divergent:
                raise BadFile(text)
            found.notes.append(text)
            break
        if not pairs and not {name for _, name in pair.run.first} & {name for _, name in pair.ref.first}:
            raise BadFile(f"{ref.path} and {run.path} share no parameter name: they are of different models")
        pairs.append(pair)
        found.steps.append(step)
        judged = [pair.judge(rank) for rank in range(len(run.ranks))]
        if distances is None:
            found.notes += pair.settle(judged)
        for rank, own in enumerate(judged):
            for one in own:
                key = (step, key_of(one.seen))
                found.distances[key] = max(found.distances.get(key, 0.0), one.distance)
                found.compared += 1
            if rank in done:
                continue
            missing = pair.missing(rank)
            stops = [
                n
                for n, one in enumerate(own)
                if one.is_too_far or (missing and one.seen.stage > Stage.CLIPPED_GRADIENT)
            ]
            for one in own[: stops[0] if stops else len(own)]:
                counts[rank] += 1
                largest[rank] = max(largest[rank], one.distance)
                before[rank] = (_what(one.seen.stage, _name(one.seen)), one.distance)
            lines = [missing] if missing else []
            if stops and own[stops[0]].is_too_far:
                one = pair.cause(rank, [one for one in own[stops[0] :] if one.is_too_far])
                seen = one.seen
                scale = pair.scale(rank, seen)
                divergent = Divergent(
                    rank, step, seen.stage, _name(seen), seen.n, counts[rank], largest[rank], one.distance * scale,
                    one.allowed * scale, before[rank], [*pair.explain(rank, seen), *lines], pair.element(rank, seen),
                )  # fmt: skip
            elif missing:
                name, *_ = pair.without_gradient(rank)
                divergent = Divergent(
                    rank, step, Stage.CLIPPED_GRADIENT, name, 0, counts[rank], largest[rank], math.inf, 0.0,
                    before[rank], lines,
                )  # fmt: skip
            else:
                continue
            done.add(rank)
            found.divergent.append(divergent)
        for reason, names in pair.skipped.items():
            skipped.setdefault(reason, set()).update(names)
        if len(done) == len(run.ranks):
            break
    if not found.compared:
        raise BadFile(f"{ref.path} and {run.path} have no tensor that can be compared")
    rows = {row for own in pairs[-1].run.rows.values() for row in own}
    found.rows = (len(rows), len({row for own in pairs[-1].ref.rows.values() for row in own}))
    found.largest, found.factor = max(largest), pairs[0].factor
    found.slack = max(pair.slack() for pair in pairs) if distances is None else 0.0
    found.notes += [f"not compared: {reason} ({listed(sorted(names))})" for reason, names in skipped.items()]
    found.divergent.sort(key=lambda one: (one.step, one.stage, one.number, one.rank))
    return found


def _name(seen: Seen) -> str:
    return name_of_seen(seen) or seen.module


def _untied(ref: Recorded, run: Recorded) -> Iterator[str]:
    for one, other in ((ref, run), (run, ref)):
        for names in one.head.ties:
            if set(names) <= other.head.parameters.keys() and set(names) not in map(set, other.head.ties):
                text = f"{listed(list(names))} are one parameter in {one.path}, and {len(names)} in {other.path}"
                yield f"{text} [{codes.UNTIED}]"


def _incomplete(side: Recorded, one: OfRank, steps: Sequence[int]) -> str:
    last = max((seen.n for seen in one.events.get(steps[-1], ())), default=0)
    wanted = [step for step in side.head.steps if step not in one.events]
    where = f"it ended in step {wanted[0]}" if wanted else "it was not closed"
    return f"{one.folder} is incomplete ({where}); compared up to event {last}"


def _other_data(pair: _Pair, ref: Recorded, run: Recorded) -> str:
    mine = {row for own in pair.run.rows.values() for row in own}
    other = {row for own in pair.ref.rows.values() for row in own}
    if not mine or not other or mine == other:
        return ""
    lacking, whose, where = (other - mine, ref, run) if other - mine else (mine - other, run, ref)
    count = f"{len(lacking)} of {len(other if whose is ref else mine)} sequences of {whose.path}"
    return f"step {pair.step}: {count} are not in {where.path}: the runs read different data"


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return "no step that all ranks have ended"
    is_range = len(steps) > 1 and list(steps) == list(range(steps[0], steps[-1] + 1))
    return f"steps {steps[0]}-{steps[-1]}" if is_range else f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"


# Text ---------------------------------------------------------------------------------------


def render(found: Comparison) -> str:
    """Return the comparison in lines."""
    sides = [f"{name} {_ranks(one)}" for name, one in (("REF", found.ref), ("RUN", found.run))]
    rows = f"the same {found.rows[0]} sequences" if found.rows[0] else "inputs without rows"
    lines = [f"{', '.join(sides)}; {_steps(found.steps)}, {found.compared:,} tensors, {rows} in step {found.steps[-1]}"]
    if abs(found.factor - 1) > numerics.ONE_FACTOR:
        lines.append(f"losses and gradients before their reduction are compared as {found.factor:.4g} x the run's")
    if not found.divergent:
        lines.append(f"no divergence (largest distance {found.largest:.1g})")
        if found.slack > numerics.WIDE:
            wide = f"{found.slack:.0%} ({numerics.RUNS_EPS:g} eps of the narrowest dtype of the steps)"
            lines.append(f"not judged: what differs by less than {wide}: record both in float32, or give --noise")
            text = "not judged: whether ranks that hold the same elements have equal bits; the doctor does"
            lines.append(f"{text} [{codes.EQUAL_PARAMETERS}]")
    groups: dict[tuple[int, Stage, str, tuple[str, ...]], list[Divergent]] = {}
    for one in found.divergent:
        groups.setdefault((one.step, one.stage, one.name, tuple(one.lines)), []).append(one)
    for number, own in enumerate(groups.values()):
        first = own[0]
        start = "first divergence on" if number == 0 else "on"
        head, *rest = _lines_of(first)
        lines += [f"{start} rank {first.rank}: {head}", *rest]
        if others := [one.rank for one in own[1:]]:
            lines.append(f"  {ranks_of(others)} diverge{'s' * (len(others) == 1)} at the same tensor")
    return "\n".join(map(printable, [*lines, *found.notes]))


def text_of(one: Divergent) -> str:
    """Return a divergence in lines that are printable."""
    return "\n".join(map(printable, _lines_of(one)))


def _lines_of(one: Divergent) -> list[str]:
    lines = [f"{one.what} in step {one.step} (event {one.n}); the {one.number} before agree "
             f"(largest distance {one.largest:.1g})"]  # fmt: skip
    if math.isfinite(one.distance):
        before = f"; {one.before[1]:.1g} at the event before it, {one.before[0]}" if one.before is not None else ""
        lines.append(f"  relative distance {one.distance:.2g}, {one.allowed:.1g} allowed{before}")
    lines += [f"  {line}" for line in one.lines]
    if one.element is not None:
        index, other, mine = one.element
        lines.append(f"  element {list(index)}: run {mine:.9g}, reference {other:.9g}")
    return lines


def _ranks(one: Recorded) -> str:
    count = len(one.ranks)
    groups = ", ".join(f"{name} {len(ranks)}" for name, ranks in one.ranks[0].groups.named.items())
    return rank_count(count) + (f" ({groups})" if groups and count > 1 else "")
