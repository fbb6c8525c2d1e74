"""Is each gradient reduced exactly once, over all ranks whose data differ, and with one factor? (D11, D12)"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.signatures import Diagnosis, diagnose, fit, name_of_factor, total
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.tensors.fingerprints import K
from shardproof.harness.training.evidence import Evidence, vector_of
from shardproof.harness.training.findings import DoctorFinding, listed
from shardproof.harness.watching.records import StepRecord

#: The titles of findings of gradients that are not summed over all ranks.
NOT_REDUCED, SOME_MISSING = "gradients are not reduced", "some ranks are missing from the gradients"

#: The title of the note that the optimizer's step may reduce them.
REDUCED_IN_STEP = "gradients are reduced in the optimizer's step, and not judged"

#: Of how many numbers gradients that a hook compresses must be.
_ENOUGH = 16

#: The title of the finding of factors that differ, and in how many layers a series of them is none by accident.
DIFFERENT_FACTORS, _LAYERS = "parameters have different factors", 3

#: The title of the note of parameters that differ between ranks from the start, and that each set reduces by itself.
PARTS = "parameters differ between ranks from the start, and no gradient of theirs is reduced over all"

#: The title of the finding of parameters that differ between ranks from the start, and have one gradient.
COPIES = "ranks began with different parameters, and average their gradients"

#: The title of the finding of gradients that no known mistake makes.
UNKNOWN = "gradients are not the sum of what ranks computed"


@dataclasses.dataclass(frozen=True)
class Factor:
    """By what the sum of all parts of some parameters' gradients is multiplied before clipping."""

    value: float
    names: tuple[str, ...]
    residual: float
    parts: int
    readers: int

    def render(self) -> str:
        """Return the factor in words: "the mean over 4 ranks (c = 0.2500 x the sum of 8 parts)"."""
        text = f"c = {self.value:.4g} x the sum of {self.parts} parts, residual {self.residual:.0e}"
        spread = max(numerics.ONE_FACTOR, self.residual)
        if self.readers > 1 and abs(self.value * self.readers - 1) < spread:
            return f"the mean over {self.readers} ranks ({text})"
        if abs(self.value - 1) < spread:
            return f"the sum over {self.readers} ranks ({text})" if self.readers > 1 else f"all of it ({text})"
        name = name_of_factor(self.value, {"the number of ranks": self.readers}, spread=spread)
        return f"{name} times the sum over {self.readers} ranks ({text})" if name else text


@dataclasses.dataclass
class Reduced:
    """What is known of the gradients of one step: the factors, and which gradients could not be judged and why.

    ``left`` are in no optimizer that steps, where others are: nobody zeroes their gradients. ``is_skipped`` if nothing
    was judged, because of another finding.
    """

    factors: list[Factor] = dataclasses.field(default_factory=list)
    unseen: dict[str, str] = dataclasses.field(default_factory=dict)
    sums: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    left: frozenset[str] = frozenset()
    is_skipped: bool = False


def check_reduction(evidence: Evidence, earlier: Sequence[Reduced]) -> tuple[list[DoctorFinding], Reduced]:
    """Judge the gradients of a step.

    Args:
        earlier: what was returned for the steps before, the last one first.
    """
    found = Reduced(left=frozenset(evidence.left))
    sorting = _Sorting(evidence, found)
    unzeroed = found.left | earlier[0].left if earlier else frozenset()
    for name in evidence.names:
        if name not in unzeroed:
            sorting.take(name, earlier)
    sorting.leave_out_mixed()
    sorting.take_factors()
    return sorting.findings(), found


_STAGES = ("after_backward", "at_step")

#: The collectives by which ranks exchange tokens.
_EXCHANGES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")

#: The signatures of gradients that are sums of whole parts of some ranks.
_OF_SUMS = (codes.SCALED, codes.UNREDUCED, codes.SOME_RANKS)

#: Why a gradient is not judged that is no sum of what ranks computed, where these are no gradients of the step.
_MADE = "not judged, as user code makes it from results of torch.autograd.grad()"
#: Why a gradient is not judged that is no sum of what ranks computed, of what DDP ignores because user code says so.
_IGNORED = "not judged, as user code has DistributedDataParallel ignore it: each rank may have its own, as experts are"
#: Why a gradient is not judged whose values are not known on any rank.
_NOT_KNOWN = "it is not known, or user code did more than scale it after backward"


class _Fit(NamedTuple):
    seen: torch.Tensor
    factor: float
    residual: float

    def is_multiple(self, tolerance: float) -> bool:
        """Whether the gradient is the sum of the parts by a factor."""
        return self.residual <= tolerance and self.factor != 0


class _Fits:
    """How a reduced gradient fits the sum of all parts, computed once for ranks that have the same."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole
        self._known: dict[int, _Fit | None] = {}
        self._alive: list[torch.Tensor] = []

    def of(self, evidence: Evidence, name: str, rank: int, stage: str) -> _Fit | None:
        """Return the fit of a gradient as a rank has it; None if that is not known, or not finite."""
        seen = evidence.assembled(name, rank, stage)
        if seen is None:
            return None
        if id(seen) not in self._known:
            self._alive.append(seen)
            self._known[id(seen)] = _Fit(seen, *fit(seen, self.whole)) if bool(seen.isfinite().all()) else None
        return self._known[id(seen)]


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """One reduced gradient of a step, and what ranks computed for it.

    Attributes:
        own: the parts of it, by rank and then by microbatch.
        tolerance: the relative distance that rounding explains.
        fits: how it fits the sum of all parts.
    """

    evidence: Evidence
    name: str
    own: dict[int, list[torch.Tensor]]
    tolerance: float
    fits: _Fits

    def fit(self, rank: int, stage: str) -> _Fit | None:
        """Return how the gradient of a rank fits the sum of all parts; None if it is not known, or not finite."""
        return self.fits.of(self.evidence, self.name, rank, stage)

    def fitted(self, stage: str) -> list[_Fit]:
        """Return how those of all ranks fit it that are known."""
        return [one for record in self.evidence.records if (one := self.fit(record.rank, stage))]

    @property
    def numel(self) -> int:
        """How many elements it has, or as many as are enough."""
        numel = self.evidence.numel(self.name)
        return _ENOUGH if numel is None else numel


class _Outcome(NamedTuple):
    """What one gradient is on one rank.

    ``signature`` is ``SCALED`` for a multiple of the sum of all parts, and "?" where no known mistake makes it.
    """

    rank: int
    signature: str
    residual: float
    diagnosis: Diagnosis | None = None


_Wrong = dict[str, list[_Outcome]]
"""By name, the gradients that are no multiple of the sum of all parts, on each rank that has one."""


class _Scale(NamedTuple):
    """By what the sum of all parts of a gradient is multiplied.

    Attributes:
        rounding: by which part of it rounding to the dtype of the gradient moves it at most.
    """

    factor: float
    residual: float
    rounding: float


_Scales = dict[str, _Scale]
"""The scales of gradients by name."""


@dataclasses.dataclass
class _Sorting:
    """The gradients of one step, sorted by what is found of them.

    Attributes:
        lost: the names of those that were computed and are in no ``.grad``.
        parts: the names of those that each set of ranks reduces by itself.
        wrong: those that are no multiple of the sum, by the signatures that they have on all ranks together.
        scales: by stage, those that are a multiple of it.
    """

    evidence: Evidence
    reduced: Reduced
    lost: list[str] = dataclasses.field(default_factory=list)
    parts: list[str] = dataclasses.field(default_factory=list)
    wrong: dict[tuple[str, ...], _Wrong] = dataclasses.field(default_factory=dict)
    scales: dict[str, _Scales] = dataclasses.field(default_factory=lambda: {stage: {} for stage in _STAGES})

    def take(self, name: str, earlier: Sequence[Reduced]) -> None:
        """Sort one gradient."""
        evidence = self.evidence
        if not (own := evidence.own(name)):
            if _is_in(evidence, name, "at_step", "unplaced"):
                self.reduced.unseen[name] = _why_unseen(evidence, name)
            return
        whole = self.reduced.sums[name] = total(own)
        if _is_in(evidence, name, *_STAGES):
            self._take_reduced(_Gradient(evidence, name, own, evidence.tolerance(name), _Fits(whole)), earlier)
        elif float(whole.norm()) > 0 and name in evidence.trained and not _is_in(evidence, name, "unplaced"):
            # Frozen parameters in a flat one have gradients while it has one, and nobody keeps these.
            self.lost.append(name)

    def _take_reduced(self, gradient: _Gradient, earlier: Sequence[Reduced]) -> None:
        name, ranks = gradient.name, range(len(self.evidence.records))
        known = [one for rank in ranks if (one := _judge(gradient, rank, earlier)) is not None]
        bad = [one for one in known if one.signature != codes.SCALED]
        if _is_in(self.evidence, name, "returned") and any(one.signature not in _OF_SUMS for one in known):
            self.reduced.unseen[name] = _MADE
        elif not known:
            self.reduced.unseen[name] = _NOT_KNOWN
        elif _is_kept(self.evidence, name, are_sums=not bad):
            self.reduced.unseen[name] = _IGNORED
        elif not bad:
            self._take_scale(gradient)
        elif all(_is_of_part(gradient, one.rank) for one in bad):
            self.parts.append(name)
        else:
            self.wrong.setdefault(tuple(sorted({one.signature for one in bad})), {})[name] = bad

    def _take_scale(self, gradient: _Gradient) -> None:
        for stage, scales in self.scales.items():
            fitted = gradient.fitted(stage)
            # A number is a multiple of any sum: of one sum on all ranks if by one factor.
            is_one = gradient.numel > 1 or all(_are_near(one.factor, fitted[0].factor) for one in fitted)
            if fitted and is_one and all(one.is_multiple(gradient.tolerance) for one in fitted):
                factor = fitted[0].factor * self.evidence.hooked(gradient.name)
                # Numbers that are all rounded alike, as one element is, have no residual: the rounding of both stages.
                rounded = 2 * self.evidence.rounding(gradient.name)
                scales[gradient.name] = _Scale(factor, max(one.residual for one in fitted), rounded)

    def leave_out_mixed(self) -> None:
        """Leave out what user code mixes, which is by chance a multiple, where a task has no part in it."""
        if _MADE not in self.reduced.unseen.values():
            return
        readers = len(self.evidence.readers)
        for name in {name for own in self.evidence.gradients for name in own.returned}:
            factors = [each[name].factor for each in self.scales.values() if name in each]
            if factors and not _is_usual(factors[0], readers):
                self.reduced.unseen[name] = _MADE
                for each in self.scales.values():
                    each.pop(name, None)

    def take_factors(self) -> None:
        """Set the factors of parameters whose gradients are a multiple of the sum."""
        evidence, reduced = self.evidence, self.reduced
        count = max((record.backwards for record in evidence.records), default=0)
        # What is reduced by hand after backward has no factor before that: then all are compared as the step finds
        # them.
        stage = max(_STAGES, key=lambda one: len(self.scales[one]))
        reduced.factors = _factors(self.scales[stage], len(evidence.readers), count)
        if self.wrong:
            # Parallel parts, as of one element, fit any sum of them: their factor counts where nothing else is wrong.
            reduced.factors = [one for one in reduced.factors if not all(_are_parallel(evidence, n) for n in one.names)]

    def findings(self) -> list[DoctorFinding]:
        """Return what is wrong, the causes first."""
        evidence, factors = self.evidence, self.reduced.factors
        found = [_finding(evidence, wrong) for wrong in self.wrong.values() if not _is_drift(evidence, wrong)]
        if self.parts:
            found.append(_of_parts(evidence, self.parts))
        if copies := [name for name in self.scales["at_step"] if _is_copied(evidence, name)]:
            found.append(_of_copies(evidence, copies))
        found += _of_ignored(evidence, self.reduced, self.scales["at_step"])
        if self.lost and any(record.optimizers for record in evidence.records):
            found.append(_of_lost(evidence, self.lost))
        if len(factors) > 1:
            found.append(_of_factors(evidence, factors))
        elif not self.wrong:
            found += _of_scales(evidence, *(self.scales[one] for one in _STAGES))
        return found


def _is_in(evidence: Evidence, name: str, *fields: str) -> bool:
    """Whether some rank's record has a parameter in one of these fields of its gradients."""
    return any(name in getattr(own, field) for own in evidence.gradients for field in fields)


def _is_usual(factor: float, readers: int) -> bool:
    """Whether a factor is that of a mean or of a sum, but for rounding."""
    return any(abs(factor * size - 1) < numerics.FACTOR_ROUNDING for size in (1, readers))


def _is_of_part(gradient: _Gradient, rank: int) -> bool:
    """Whether a gradient is all of what the ranks have computed that hold the same part of a model as this one."""
    evidence, name = gradient.evidence, gradient.name
    members = evidence.parts.get(name, {}).get(rank, ())
    mine = {one: gradient.own[one] for one in members if one in gradient.own}
    if not mine:
        return False
    fits = _Fits(total(mine))
    fitted = [one for stage in _STAGES if (one := fits.of(evidence, name, rank, stage)) is not None]
    return any(one.is_multiple(gradient.tolerance) for one in fitted)


def _of_parts(evidence: Evidence, names: list[str]) -> DoctorFinding:
    """Make the note of gradients that are not reduced over ranks whose parameters were others from the start."""
    alike = [name for name in names if all(name in start.constant for start in evidence.starts)]
    copies = f"{listed(alike)}: of one value when training begins, so parts or copies; copies, as norms in sequence "
    lines = (
        f"{listed(names)}: each rank, or each set of ranks that began with the same values, has its own gradient "
        f"({len(names)} of {len(evidence.trained)} parameters)",
        *([copies + "parallelism are, need the sum over the ranks"] if alike else []),
        "meant, as for parts of one model (tensor, expert or pipeline parallel by hand)? else initial values are not "
        "broadcast, and gradients are not reduced",
    )
    return DoctorFinding((codes.REDUCED_ONCE,), codes.UNREDUCED, evidence.step, PARTS, lines, is_note=True)


def _is_copied(evidence: Evidence, name: str) -> bool:
    """Whether ranks that begin with different values of a parameter step them by one gradient, that of all ranks.

    No parts of one model do: the gradient of a part is that of its own values. Parameters that are broadcast after the
    first backward are equal when the step ends.
    """
    if name not in evidence.parts or len(evidence.own(name)) < 2 or _are_parallel(evidence, name):
        return False
    held = [own.at_step.get(name) for own in evidence.gradients]
    ends = [record.parameters[name].after if name in record.parameters else None for record in evidence.records]
    marks = {None if one is None or one.pending or not one.box.is_full else one.fingerprint.identity for one in held}
    return None not in marks and len(marks) == 1 and None not in ends and len(set(ends)) > 1


def _of_copies(evidence: Evidence, names: list[str]) -> DoctorFinding:
    """Make the finding of gradients that are averaged over ranks whose parameters differ from the start."""
    lines = (
        f"{listed(names)}: each rank steps its own values by one gradient, which all ranks computed together "
        f"({len(names)} of {len(evidence.trained)} parameters)",
        "give each the values of one rank before training: broadcast them, or build the model with one seed on each",
    )
    return DoctorFinding((codes.EQUAL_PARAMETERS,), codes.APART, evidence.step, COPIES, lines)


def _of_ignored(evidence: Evidence, reduced: Reduced, scales: _Scales) -> Iterator[DoctorFinding]:
    """Note experts of ranks that are stepped by all of the gradient of a mean loss of each rank, and others by a mean.

    Where ranks exchange what experts compute, the gradient of an expert is a sum over the ranks of that of their loss.
    """
    mine = [name for name, why in reduced.unseen.items() if why == _IGNORED and not _are_parallel(evidence, name)]
    readers, factors = len(evidence.readers), _factors(scales, len(evidence.readers), 1)
    if not mine or not factors or readers < 2 or not _exchange(evidence):
        return
    most = max(factors, key=lambda one: len(one.names)).value
    factors_of = {name: [*_own_factors(evidence, name)] for name in mine}
    kept = [name for name, own in factors_of.items() if own and all(_are_near(one, most * readers) for one in own)]
    if kept:
        lines = (
            f"{listed(kept)}, which DistributedDataParallel ignores: stepped by what each rank computed, and others by "
            f"{most:.4g} x the sum over {readers} ranks",
            "seen: ranks exchange tensors in forward and backward, as tokens are: then the gradient of an expert has "
            "the losses of all ranks in it, which others divide by the number of ranks",
            "meant, as where the exchange divides gradients, or the parameters are for the rank's own data? else "
            "divide them by the number of ranks",
        )
        yield DoctorFinding((codes.ONE_FACTOR,), codes.SCALED, evidence.step, DIFFERENT_FACTORS, lines, is_note=True)


def _is_kept(evidence: Evidence, name: str, *, are_sums: bool) -> bool:
    """Whether DDP ignores a parameter, and its gradients are no sums over ranks, or a rank's own too."""
    return name in evidence.ignored and (not are_sums or any(map(math.isfinite, _own_factors(evidence, name))))


def _exchange(evidence: Evidence) -> bool:
    """Whether user code exchanges tensors between ranks in forward and in backward."""
    phases = {(one.phase, one.kind) for one in evidence.records[0].collectives}
    return all(any((phase, kind) in phases for kind in _EXCHANGES) for phase in ("forward", "backward"))


def _own_factors(evidence: Evidence, name: str) -> Iterator[float]:
    """Yield by what the step finds the gradient that each rank has computed multiplied; NaN where by no factor."""
    for rank, own in evidence.own(name).items():
        seen, mine = evidence.gradients[rank].at_step.get(name), total({rank: own})
        if float(mine.norm()):
            factor, rest = fit(vector_of(seen), mine) if seen is not None else (math.nan, 0.0)
            yield factor if rest <= evidence.tolerance(name) else math.nan


def _why_unseen(evidence: Evidence, name: str) -> str:
    """Say why the own gradient of a parameter is not known, so that its reduction is not judged."""
    record = evidence.records[0]
    if record.gradients.are_consumed:
        return (
            "not judged, as an optimizer steps within backward and consumes gradients there (a hook of a parameter "
            "calls step()): after its first step in a backward no own gradient is read"
        )
    if record.modules.compiled or record.modules.unhooked:
        return "not judged, as its own gradient is computed inside of a compiled module or function"
    return "not judged, as no forward of a watched module found it, so its own gradient was not seen"


def _judge(gradient: _Gradient, rank: int, earlier: Sequence[Reduced]) -> _Outcome | None:
    """Judge one gradient on one rank, after backward or else at the optimizer's step; None if it is not known."""
    outcomes: dict[str, _Outcome] = {}
    for stage in _STAGES:
        fitted = gradient.fit(rank, stage)
        if fitted is None:
            continue
        is_zero = float(fitted.seen.norm()) == float(gradient.fits.whole.norm()) == 0
        if fitted.is_multiple(gradient.tolerance) or is_zero:
            return _Outcome(rank, codes.SCALED, fitted.residual)
        outcomes[stage] = _diagnosed(gradient, rank, fitted, earlier)
    last = outcomes.get("at_step")
    if last is None:
        return None
    if last.diagnosis is None and not is_scaled(gradient.evidence, gradient.name, rank, gradient.tolerance):
        # Between backward and the step user code did more than scale it: what it was in between is not known.
        return None
    first = outcomes.get("after_backward", last)
    if first.diagnosis is None or last.diagnosis is None:
        return first if last.diagnosis is None else last
    # Of one mistake the factor before clipping is told.
    return first if first.diagnosis.text == last.diagnosis.text else last


def _diagnosed(gradient: _Gradient, rank: int, fitted: _Fit, earlier: Sequence[Reduced]) -> _Outcome:
    """Name the mistake that makes a gradient that is no multiple of the sum of all parts."""
    before = [one.sums[gradient.name] for one in earlier if gradient.name in one.sums]
    groups = gradient.evidence.groups_of(rank)
    found = diagnose(fitted.seen, gradient.own, rank=rank, groups=groups, earlier=before, tolerance=gradient.tolerance)
    # Some weights fit any gradient of as many elements, or of one more, as the bias before a softmax sums to zero.
    if found is None or (found.weights > 1 and gradient.numel <= found.weights + 2):
        return _Outcome(rank, "?", fitted.residual)
    return _Outcome(rank, found.signature, found.residual, found)


def is_scaled(evidence: Evidence, name: str, rank: int, tolerance: float) -> bool:
    """Whether a gradient at the optimizer's step is what backward left, by a factor."""
    own = evidence.gradients[rank]
    before, after = own.after_backward.get(name), own.at_step.get(name)
    if before is None or after is None:
        return before is None
    factor, residual = fit(vector_of(after), vector_of(before))
    return residual <= tolerance and factor > 0


def _are_parallel(evidence: Evidence, name: str) -> bool:
    """Whether the parts of a gradient fit any sum of them, as those of one element do; also where there are none."""
    if not (own := evidence.own(name)):
        return True
    whole, tolerance = total(own), evidence.tolerance(name)
    return all(fit(part, whole)[1] <= 8 * tolerance for parts in own.values() for part in parts if float(part.norm()))


def _factors(values: _Scales, readers: int, count: int) -> list[Factor]:
    """Sort parameters by their factors."""
    classes: list[tuple[float, list[str], float]] = []
    spread = max(numerics.ONE_FACTOR, 4 * max((one.residual for one in values.values()), default=0.0))
    # Those that are rounded least first, with which others are compared.
    for name, (value, residual, rounding) in sorted(values.items(), key=lambda one: one[1].rounding):
        allowed = max(spread, rounding)
        near = next((one for one in classes if abs(one[0] - value) <= allowed * abs(value)), None)
        if near is None:
            classes.append((value, [name], residual))
        else:
            near[1].append(name)
            classes[classes.index(near)] = (near[0], near[1], max(near[2], residual))
    made = [Factor(value, tuple(names), residual, readers * count, readers) for value, names, residual in classes]
    # A mean or a sum is what most training loops make, and what others are compared with.
    usual = (1 / readers, 1.0)
    return sorted(made, key=lambda one: (min(abs(one.value / value - 1) for value in usual) > spread, -len(one.names)))


def _is_drift(evidence: Evidence, wrong: _Wrong) -> bool:
    """Whether what is missing comes from ranks that read the same data, which the check of replicas tells better."""
    first = next(iter(wrong.values()))
    for rank, _, _, diagnosis in first:
        if diagnosis is None or not diagnosis.missing:
            return False
        present = {evidence.reader_of(one) for one in range(len(evidence.records)) if one not in diagnosis.missing}
        if any(evidence.reader_of(one) not in present for one in diagnosis.missing) or rank in diagnosis.missing:
            return False
    return True


def _finding(evidence: Evidence, wrong: _Wrong) -> DoctorFinding:
    """Make one finding of the parameters whose gradients have the same signature."""
    names = list(wrong)
    count = f"{len(names)} of {len(evidence.trained)} parameters"
    first = wrong[names[0]]
    _, _, residual, diagnosis = first[0]
    ranks = [one.rank for one in first]
    who = "every rank" if len(ranks) == len(evidence.records) else ranks_of(ranks)
    of = f" ({count})" if len(names) == len(evidence.trained) else f" ({count}: {listed(names)})"
    if diagnosis is None:
        return (
            _under_hook(evidence, names, residual, of)
            if evidence.hooks
            else _of_none(evidence, names, who, residual, of)
        )
    texts = [one.diagnosis.text for one in first if one.diagnosis is not None]
    is_each_own = len(ranks) > 1 and texts == [f"counts rank {rank} twice" for rank in ranks]
    text = "counts this rank twice" if is_each_own else diagnosis.text
    line = f"each gradient of {who} {text} (c = {diagnosis.factor:.4f}, residual {diagnosis.residual:.0e}){of}"
    note = _if_meant(evidence, names, diagnosis)
    cause = note or _CAUSES.get(diagnosis.signature, _of_earlier)(evidence, names, diagnosis)
    is_open = note is None and diagnosis.signature in (codes.WEIGHTED, codes.MISPLACED)
    lines = (line + cause.over, *cause.lines)
    return DoctorFinding(
        (codes.REDUCED_ONCE,), diagnosis.signature, evidence.step, cause.title, lines, note is not None, is_open
    )


def _of_none(evidence: Evidence, names: Sequence[str], who: str, residual: float, of: str) -> DoctorFinding:
    """Make the finding of gradients that no known mistake makes."""
    line = (
        f"the gradients of {who} are not a multiple of the sum of all ranks' own gradients: a relative distance "
        f"of {residual:.2g} remains, and rounding explains {evidence.tolerance(names[0]):.1g}{of}"
    )
    if tied := _tied_late(evidence, names):
        more = (
            f"seen: {listed(tied)} are one parameter of the model, and each has a gradient of its own: units of "
            "fully_shard() that were made before the tie have two; tie before fully_shard()"
        )
        return DoctorFinding((codes.REDUCED_ONCE,), codes.UNTIED, evidence.step, UNKNOWN, (line, more))
    if any(record.norms.clipped_scaled for record in evidence.records):
        more = (
            "seen: gradients were clipped, and the loss scaler unscaled them after that: once all microbatches of the "
            "step are accumulated, call scaler.unscale_(optimizer), then clip"
        )
        return DoctorFinding((codes.REDUCED_ONCE,), "", evidence.step, UNKNOWN, (line, more))
    lines = line, "and they match no known mistake"
    return DoctorFinding((codes.REDUCED_ONCE,), "", evidence.step, UNKNOWN, lines, is_open=True)


def _tied_late(evidence: Evidence, names: Sequence[str]) -> list[str]:
    """Return the names of a parameter of a unit of FSDP2 that has own gradients under several of its names."""
    record = evidence.records[0]
    is_unit = "fully_shard" in evidence.starts[0].reducers.names
    for tied in record.modules.ties if is_unit else ():
        own = [name for name in tied if name in record.gradients.own]
        if len(own) > 1 and set(names) <= set(tied):
            return own
    return []


class _Cause(NamedTuple):
    """Why gradients have a signature: the title of the finding, and what follows the line that tells which they have.

    ``over`` is the end of that line.
    """

    title: str
    lines: Sequence[str] = ()
    over: str = ""


def _if_meant(evidence: Evidence, names: Sequence[str], diagnosis: Diagnosis) -> _Cause | None:
    """Say why gradients that lack ranks may be meant; None if they may not."""
    is_local = diagnosis.signature in (codes.UNREDUCED, codes.SOME_RANKS) and bool(diagnosis.missing)
    if is_local and evidence.reduces_in_step:
        lines = (
            "the step itself sums as many elements over ranks, and the doctor does not see the result:",
            "equal parameters after it are no proof that no rank is lost; compare with a recording of one rank "
            "(docs/record.md)",
        )
        return _Cause(REDUCED_IN_STEP, lines)
    is_meant = evidence.reduces_nothing or any("localsgd" in name.lower() for name in evidence.hooks)
    # What fits any sum, as a gradient of one element does, is no sign of a reduction.
    is_all = all(name in names or _are_parallel(evidence, name) for name in evidence.trained)
    # Of ranks whose parameters are equal all the same, gradients are lost.
    if is_local and is_all and is_meant and not evidence.ends_equal:
        line = (
            "meant, as where each rank trains by itself, as copies in meta-learning do, or parameters are averaged "
            "later (local SGD)? else nothing reduces them: DDP, fully_shard() or an all_reduce is missing"
        )
        return _Cause(NOT_REDUCED, (line,))
    return None


def _of_unreduced(evidence: Evidence, names: Sequence[str], diagnosis: Diagnosis) -> _Cause:
    over = f": {'nothing was' if diagnosis.missing else 'these were not'} reduced over {_over(evidence)}"
    return _Cause(NOT_REDUCED, _why_not_reduced(evidence, names), over)


def _of_some_ranks(evidence: Evidence, names: Sequence[str], diagnosis: Diagnosis) -> _Cause:
    differ = "have different data" if len(evidence.readers) == len(evidence.records) else "are of one training"
    line = f"all {len(evidence.records)} ranks {differ}, and their parameters drift apart"
    return _Cause(SOME_MISSING if diagnosis.missing else "a rank counts twice", (line,))


def _of_some_microbatches(evidence: Evidence, names: Sequence[str], diagnosis: Diagnosis) -> _Cause:
    title = "gradients lack microbatches" if "only" in diagnosis.text else "microbatches count wrongly"
    if "only" in diagnosis.text and "last" in diagnosis.text:
        return _Cause(title, (_why_last(evidence),))
    if "only" in diagnosis.text and "first" in diagnosis.text:
        return _Cause(title, _why_not_reduced(evidence, names))
    if "zeroed" in diagnosis.text:
        return _Cause("gradients are never zeroed", (_why_never_zeroed(evidence),))
    return _Cause(title)


def _of_weighted(evidence: Evidence, names: Sequence[str], diagnosis: Diagnosis) -> _Cause:
    return _Cause("microbatches have different weights")


def _of_earlier(evidence: Evidence, names: Sequence[str], diagnosis: Diagnosis) -> _Cause:
    return _Cause("gradients are of an earlier step")


#: By signature, what makes the cause of gradients that have it; those of all others are of an earlier step.
_CAUSES = {
    codes.UNREDUCED: _of_unreduced,
    codes.SOME_RANKS: _of_some_ranks,
    codes.SOME_MICROBATCHES: _of_some_microbatches,
    codes.WEIGHTED: _of_weighted,
}


def _why_not_reduced(evidence: Evidence, names: Sequence[str]) -> list[str]:
    """Say what was seen to keep gradients from their reduction, and what mends it: the first that was seen."""
    if found := [*_seen_in_groups(evidence), *_seen_under_no_sync(evidence.records[0])]:
        return found
    # The optimizer of another root zeroes gradients at any time.
    first = (_seen_no_wrapper,) if evidence.are_others_reduced else ()
    for seen in (
        *first,
        _seen_zeroed,
        _seen_replaced,
        _seen_in_no_unit,
        _seen_bypassed,
        _seen_of_copies,
        _seen_no_wrapper,
    ):
        if found := list(seen(evidence, names)):
            return found
    return [
        f"seen: {' and '.join(evidence.starts[0].reducers.names)}, and nothing that switches the reduction off: it "
        "reduces the gradients of its own forward only"
    ]


def _seen_in_groups(evidence: Evidence) -> Iterator[str]:
    groups = {name: ranks for name, ranks in evidence.groups_of(0).items() if name in evidence.data_names}
    if groups and all(len(ranks) == 1 for ranks in groups.values()):
        yield (f"seen: the group {next(iter(groups))!r} over which gradients are reduced has one rank: give the "
               "wrapper the mesh of all data-parallel ranks")  # fmt: skip


def _seen_under_no_sync(record: StepRecord) -> Iterator[str]:
    off = [set(one) for one in record.forwards.off]
    always, last = set.intersection(*off) if off else set(), off[-1] if off else set()
    if name := next(iter(always & last), ""):
        yield f"seen: each backward of the step ran under {name}; the last one must not"
    elif name := next(iter(last), ""):
        yield (f"seen: the last backward of the step ran under {name}, and one before it did not: "
               "the last one must reduce, and only that")  # fmt: skip


def _seen_zeroed(evidence: Evidence, names: Sequence[str]) -> Iterator[str]:
    if any(evidence.gradients[0].zeroed):
        yield "seen: zero_grad() was called after a backward of the step and before the optimizer's step"


def _seen_in_no_unit(evidence: Evidence, names: Sequence[str]) -> Iterator[str]:
    parameters = evidence.records[0].parameters
    is_sharded = any(parameters[name].mesh for name in names if name in parameters)
    if evidence.starts[0].reducers.names == ("fully_shard",) and not is_sharded:
        yield "seen: they are in no unit of fully_shard: shard them, or reduce their gradients by hand"


def _seen_replaced(evidence: Evidence, names: Sequence[str]) -> Iterator[str]:
    modules = evidence.records[0].modules
    ddp = "seen: DistributedDataParallel reduces the parameters that it was made with"
    if replaced := [name for name in modules.replaced if name in names]:
        yield f"{ddp}, and {listed(replaced)} replaced one since then: replace, load and tie before wrapping"
    elif modules.gone:
        has = "one of them is" if modules.gone == 1 else f"{modules.gone} of them are"
        yield (f"{ddp}, {has} no longer the model's, and it waits for all of a bucket: replace, load and tie "
               "before wrapping")  # fmt: skip


def _seen_bypassed(evidence: Evidence, names: Sequence[str]) -> Iterator[str]:
    if around := evidence.starts[0].reducers.bypassed:
        yield (f"seen: {' and '.join(around)} around {evidence.starts[0].model}, which the loop does not call: "
               "call it, and not its .module; move the computation of other methods into forward")  # fmt: skip


def _seen_of_copies(evidence: Evidence, names: Sequence[str]) -> Iterator[str]:
    parts = [name for name in evidence.parts if name not in evidence.starts[0].constant]
    if parts and len({one.forwards.batches for one in evidence.records}) == 1:
        yield (f"ranks that read the same and compute parts of one model ({listed(parts)} differ from the start) have "
               "other gradients of their copies:")  # fmt: skip
        yield "random numbers, as of dropout, must be equal on them, and gradients of a part of the sequence be summed"


def _seen_no_wrapper(evidence: Evidence, names: Sequence[str]) -> Iterator[str]:
    if not any(evidence.starts[0].reducers.names):
        yield ("seen: neither DistributedDataParallel nor fully_shard around the module that the loop calls: "
               "call the wrapped module, or reduce gradients by hand")  # fmt: skip


def _why_last(evidence: Evidence) -> str:
    """Say why gradients have the last microbatch only, by the calls of ``zero_grad()`` that were seen."""
    record = evidence.records[0]
    if between := sum(0 < one < record.backwards for one in record.gradients.zeroed):
        often = "once" if between == 1 else f"{between} times"
        return (
            f"seen: zero_grad() was called {often} between the backward passes of the step: call it after the step only"
        )
    return (
        "no zero_grad() was seen between the backward passes: something else empties the gradients, or each backward "
        "writes its own"
    )


def _why_never_zeroed(evidence: Evidence) -> str:
    """Say why gradients of earlier steps are still there, by the calls of ``zero_grad()`` that were seen."""
    if not any(own.zeroed for own in evidence.gradients):
        return "no call of zero_grad() was seen since the step before: call it once a step"
    return "zero_grad() was called, of an optimizer or a module without these parameters: zero these as well"


def _under_hook(evidence: Evidence, names: list[str], residual: float, of: str) -> DoctorFinding:
    """Make the finding of gradients that a communication hook changes: it may, and may lose no rank."""
    hook = " and ".join(map(repr, evidence.hooks))
    if (found := _nearer(evidence, names)) is not None:
        rank, near, whole = found
        lines = (
            f"under the communication hook {hook} gradients are nearer to the sum without rank {rank} (a relative "
            f"distance of {near:.2g}) than to that of all ranks ({whole:.2g}){of}",
            f"look in the hook for where it leaves out rank {rank}, or reduces over a subgroup",
        )
        return DoctorFinding((codes.REDUCED_ONCE,), codes.SOME_RANKS, evidence.step, SOME_MISSING, lines)
    lines = (
        f"{hook}: a relative distance of {residual:.2g} to the sum of all ranks' own gradients remains{of}",
        "meant, as where it compresses? then a mistake of that size is not seen: train a few steps without it",
    )
    title = "a communication hook changes gradients, which are not judged"
    return DoctorFinding((codes.REDUCED_ONCE,), "", evidence.step, title, lines, is_note=True)


def _nearer(evidence: Evidence, names: Sequence[str]) -> tuple[int, float, float] | None:
    """Return the rank without which the sum is much nearer to gradients, all taken together, and both distances."""
    seen = {name: one for name in names if (one := evidence.assembled(name, 0, "after_backward")) is not None}
    ranks = sorted({rank for name in seen for rank in evidence.own(name)})
    if len(ranks) < 2 or len(seen) * K < _ENOUGH:
        return None
    nothing = [torch.zeros(K, dtype=torch.float64)]
    sums = {
        rank: torch.cat([torch.stack(list(evidence.own(name).get(rank, nothing))).sum(0) for name in seen])
        for rank in ranks
    }
    gradient, whole = torch.cat(list(seen.values())), torch.stack(list(sums.values())).sum(0)
    near, rank = min((fit(gradient, whole - own)[1], rank) for rank, own in sums.items())
    distance = fit(gradient, whole)[1]
    return (rank, near, distance) if near < numerics.COMPRESSED_NEARER * distance else None


def _over(evidence: Evidence) -> str:
    named = {name: members for name, members in evidence.groups_of(0).items() if name in evidence.data_names}
    everyone = ranks_of(range(len(evidence.records)))
    return " and ".join(f"{name} ({ranks_of(members)})" for name, members in named.items()) or everyone


def _of_lost(evidence: Evidence, names: list[str]) -> DoctorFinding:
    """Make the finding of parameters whose own gradients were computed and are in no ``.grad``."""
    lines = (
        f"{listed(names)}: ranks computed gradients, and no .grad has one when the optimizer steps "
        f"({len(names)} of {len(evidence.trained)} parameters)",
        *_why_not_reduced(evidence, names),
    )
    return DoctorFinding((codes.REDUCED_ONCE,), codes.UNREDUCED, evidence.step, NOT_REDUCED, lines)


def _of_factors(evidence: Evidence, factors: Sequence[Factor]) -> DoctorFinding:
    """Make the finding of parameters with different factors; of whole classes of modules, as in muP, it is a note."""
    most = factors[0]
    lines = [f"{len(most.names)} of {sum(len(one.names) for one in factors)} parameters: {most.render()}"]
    sizes = {"the number of ranks": float(len(evidence.records))}
    for start in evidence.starts[:1]:
        sizes |= {f"the size of {name}": float(len(members)) for name, members in start.groups.named.items()}
    sizes["the number of microbatches"] = float(max(record.backwards for record in evidence.records))
    for other in factors[1:]:
        ratio = other.value / most.value
        name = name_of_factor(ratio, sizes, spread=numerics.ONE_FACTOR)
        times = f"{ratio:.4g} times as much{f': {name}' if name else ''}"
        lines.append(f"{listed(list(other.names))}: c = {other.value:.4f}, {times}")
        if by_hooks := {f"{found:.4g}" for one in other.names if (found := evidence.hooked(one)) != 1}:
            by = ", ".join(sorted(by_hooks))
            lines.append(f"seen: a hook of each of them (register_hook) multiplies its gradient by {by}")
    is_note = _are_of_classes(evidence, {name: one.value for one in factors for name in one.names})
    lines.append("an optimizer such as Adam hides the difference, the norm of all gradients and clipping do not")
    if is_note:
        lines.append("meant, as in muP, for experts or by layer? else these are reduced or scaled otherwise")
    return DoctorFinding(
        (codes.ONE_FACTOR,), codes.SCALED, evidence.step, DIFFERENT_FACTORS, tuple(lines), is_note, is_open=not is_note
    )


def _of_scales(evidence: Evidence, before: _Scales, after: _Scales) -> list[DoctorFinding]:
    """Make the note of parameters that user code scales otherwise than others of their class before the step.

    Clipping of each parameter by its own norm gives each a factor of its own.
    """
    scales = {name: _Scale(one.factor / before[name].factor, max(one.residual, before[name].residual), one.rounding)
              for name, one in after.items() if name in before and before[name].factor != 0}  # fmt: skip
    factors = _factors(scales, 1, 1)
    if not 1 < len(factors) <= max(2, len(scales) // 4):
        return []
    most = max(factors, key=lambda one: len(one.names))
    if _are_of_classes(evidence, {name: one.factor for name, one in scales.items()}):
        return []
    lines = [f"user code multiplies {len(most.names)} of {len(scales)} gradients by {most.value:.4g} before the step"]
    lines += [f"{listed(list(one.names))}: by {one.value:.4g}" for one in factors if one is not most]
    lines.append("meant? others of the same class of modules have another factor")
    return [
        DoctorFinding((codes.ONE_FACTOR,), codes.SCALED, evidence.step, DIFFERENT_FACTORS, tuple(lines), is_note=True)
    ]


def _are_of_classes(evidence: Evidence, values: dict[str, float]) -> bool:
    """Whether all parameters of a class of modules have one factor, or one that grows from layer to layer by a ratio.

    Those of a class have one shape, and one name but for the number of the layer.
    """
    classes: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name in values:
        key = re.sub(r"\d+", "*", name, count=1), evidence.starts[0].shapes.get(name, ())
        classes.setdefault(key, []).append(name)
    for names in classes.values():
        layers = [int(found[0]) if (found := re.search(r"\d+", name)) else 0 for name in names]
        mine = sorted(zip(layers, (values[name] for name in names), strict=True))
        if not all(_are_near(one, mine[0][1]) for _, one in mine) and not _is_series(mine):
            return False
    return True


def _is_series(values: Sequence[tuple[int, float]]) -> bool:
    """Whether the factors of at least three layers grow by one ratio from each to the next, as in layer-wise decay."""
    if len(values) < _LAYERS or len({layer for layer, _ in values}) < len(values):
        return False
    if min(value for _, value in values) <= 0:
        return False
    ratios = [(b / a) ** (1 / (j - i)) for (i, a), (j, b) in itertools.pairwise(values)]
    return all(_are_near(one, ratios[0]) for one in ratios)


def _are_near(one: float, other: float) -> bool:
    return abs(one - other) <= numerics.SERIES_OF_FACTORS * abs(other)
