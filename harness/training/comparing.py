"""Where do two recordings first diverge? Offline, whatever the worlds, meshes and accumulation of their runs.

Parameters, their gradients and states are assembled from the digests of all ranks, by name and step. What depends on
data (losses, gradients before their reduction, outputs of modules) is compared as sums over microbatches that read the
same rows: two sets of microbatches, one of each recording, that no row connects to others. The loss of a rank may be
any factor times the reference's, if one factor serves all microbatches of a step: the reduction makes up for it.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from shardproof.door import BadFile, printable
from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.finding import Stage
from shardproof.harness.judging.texts import rank_count, ranks_of
from shardproof.harness.training import resuming
from shardproof.harness.training.alignment import Key, RecordedStep, key_of, name_of_seen
from shardproof.harness.training.explaining import Explained
from shardproof.harness.training.findings import listed
from shardproof.harness.training.pairs import Judged, Pair, what
from shardproof.harness.training.recording import Recorded, RecordedEvent
from shardproof.harness.training.resuming import Aligned, Resumption, steps_of

_AT_STEP = Stage.CLIPPED_GRADIENT
_BEFORE_DATA = (Stage.INITIAL,)


@dataclasses.dataclass
class DivergentEvent:
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
        return what(self.stage, self.name)


@dataclasses.dataclass
class Comparison:
    """What was compared of two recordings, and where they first diverge.

    Attributes:
        compared: how many tensors.
        divergent: the first event of each rank that diverges, in the order of steps, stages and ranks.
        slack: what is allowed by the narrowest dtype alone.
        distances: the largest by step and tensor.
        resumption: what aligned steps show of a checkpoint; None of recordings that are compared as they are.
        has_other_data: whether the last of the steps reads other data on the two sides.
    """

    ref: Recorded
    run: Recorded
    steps: list[int]
    compared: int = 0
    divergent: list[DivergentEvent] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    rows: tuple[int, int] = (0, 0)
    largest: float = 0.0
    factor: float = 1.0
    slack: float = 0.0
    distances: dict[tuple[int, Key], float] = dataclasses.field(default_factory=dict)
    resumption: Resumption | None = None
    has_other_data: bool = False

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return not self.divergent and not (self.resumption and self.resumption.lines)

    def add(self, pair: Pair, judged: Sequence[Sequence[Judged]]) -> None:
        """Add what was compared of a step."""
        self.steps.append(pair.step)
        if self.resumption is not None:
            self.resumption.add(pair)
        for one in (one for own in judged for one in own):
            key = (pair.step, key_of(one.seen))
            self.distances[key] = max(self.distances.get(key, 0.0), one.distance)
            self.compared += 1

    def end(self, pairs: Sequence[Pair], largest: Sequence[float], *, has_noise: bool) -> None:
        """Add what all steps together show."""
        self.largest = max(largest)
        if pairs:
            rows = {row for own in pairs[-1].run.rows.values() for row in own}
            self.rows = (len(rows), len({row for own in pairs[-1].ref.rows.values() for row in own}))
            self.factor = pairs[0].factor
            self.slack = 0.0 if has_noise else max(pair.slack() for pair in pairs)
        skipped: dict[str, set[str]] = {}
        for reason, names in (one for pair in pairs for one in pair.skipped.items()):
            skipped.setdefault(reason, set()).update(names)
        self.notes += [f"not compared: {reason} ({listed(sorted(names))})" for reason, names in skipped.items()]
        self.notes += self.resumption.notes() if self.resumption is not None else ()
        self.divergent.sort(key=lambda one: (one.step, one.stage, one.number, one.rank))


def compare(
    ref: Recorded, run: Recorded, *, noise: Recorded | None = None, align: int | str | None = None
) -> Comparison:
    """Compare a recording with a reference.

    Args:
        noise: a second recording of the reference's run, from which tolerances are taken.
        align: the step of the reference that is step 0 of the run, as of a resumed training; "data" finds it by the
            data that both have read. None: steps of one number are compared.

    Raises:
        BadFile: they have no step or no parameter in common, or read different data; in one line.
    """
    aligned = resuming.align(ref, run, align) if align is not None else None
    if aligned is not None:
        ref, noise = ref.shifted(aligned.offset), noise and noise.shifted(aligned.offset)
    distances = compare(ref, noise).distances if noise is not None else None
    steps = _common_steps(ref, run)
    found = Comparison(ref, run, [], notes=[*_untied(ref, run), *_incomplete(ref, run, steps)])
    found.resumption = Resumption() if aligned is not None else None
    passed = [_Passed(rank) for rank in range(len(run.ranks))]
    pairs = _compare_steps(found, steps, passed, distances, aligned)
    if not found.compared:
        raise BadFile(f"{ref.path} and {run.path} have no tensor that can be compared")
    found.end(pairs, [one.largest for one in passed], has_noise=noise is not None)
    return found


def _compare_steps(
    found: Comparison,
    steps: Sequence[int],
    passed: Sequence["_Passed"],
    noise: Mapping[tuple[int, Key], float] | None,
    aligned: Aligned | None,
) -> list[Pair]:
    """Add the steps, until each rank has diverged or data differ; return those that have read the same data."""
    pairs: list[Pair] = []
    for step in steps:
        pair = Pair(RecordedStep(found.ref, step), RecordedStep(found.run, step), noise, pairs)
        stages = _stages(pair, found, aligned)
        if not stages:
            break
        if not pairs:
            _refuse_other_models(pair)
        judged = [pair.judge(one.rank, stages) for one in passed]
        if stages != _BEFORE_DATA:
            pairs.append(pair)
            found.notes += pair.settle(judged)
        found.add(pair, judged)
        for one, own in zip(passed, judged, strict=True):
            found.divergent += one.first(pair, own)
        if stages == _BEFORE_DATA or all(one.diverges for one in passed):
            break
    return pairs


def _stages(pair: Pair, found: Comparison, aligned: Aligned | None) -> Sequence[Stage]:
    """Return the stages of a step that can be compared: those that no data reach, if the run reads other data."""
    text = _other_data(pair)
    if not text:
        return tuple(Stage)
    if found.resumption is not None and (said := resuming.other_data(pair, aligned)):
        found.resumption.add_lines(resuming.BY_ROWS, [said])
        found.has_other_data = True
        found.notes.append(f"not compared: anything that depends on the data of step {pair.step}")
        return _BEFORE_DATA
    if not found.divergent:
        raise BadFile(text + (resuming.suggestion(pair.ref.recorded, pair.run.recorded) if aligned is None else ""))
    found.notes.append(text)
    return ()


@dataclasses.dataclass
class _Passed:
    """What was compared of a rank of the run before its first divergence.

    Attributes:
        number: how many tensors.
        largest: the largest distance among them.
        before: the last of them, and its distance.
        diverges: whether the divergence was found.
    """

    rank: int
    number: int = 0
    largest: float = 0.0
    before: tuple[str, float] | None = None
    diverges: bool = False

    def first(self, pair: Pair, judged: Sequence[Judged]) -> list[DivergentEvent]:
        """Return the rank's first divergence, if it is in this step."""
        if self.diverges:
            return []
        missing = pair.missing(self.rank)
        # A gradient that lacks shows when the optimizer has stepped.
        stops = (n for n, one in enumerate(judged) if one.is_too_far or (missing and one.seen.stage > _AT_STEP))
        stop = next(stops, len(judged))
        for one in judged[:stop]:
            self.number += 1
            self.largest = max(self.largest, one.distance)
            self.before = (what(one.seen.stage, _name(one.seen)), one.distance)
        lines = [missing] if missing else []
        if stop < len(judged) and judged[stop].is_too_far:
            explained = Explained(pair, self.rank)
            cause = explained.cause([one for one in judged[stop:] if one.is_too_far])
            scale = pair.scale(self.rank, cause.seen)
            found = self._divergent(pair, cause.seen.stage, _name(cause.seen), cause.distance * scale)
            found.n, found.allowed = cause.seen.n, cause.allowed * scale
            found.lines, found.element = explained.lines(cause.seen) + lines, pair.element(self.rank, cause.seen)
        elif missing:
            found = self._divergent(pair, _AT_STEP, pair.without_gradient(self.rank)[0], math.inf)
            found.lines = lines
        else:
            return []
        self.diverges = True
        return [found]

    def _divergent(self, pair: Pair, stage: Stage, name: str, distance: float) -> DivergentEvent:
        return DivergentEvent(
            self.rank, pair.step, stage, name, 0, self.number, self.largest, distance, 0.0, self.before, []
        )


def _name(seen: RecordedEvent) -> str:
    return name_of_seen(seen) or seen.module


def _untied(ref: Recorded, run: Recorded) -> Iterator[str]:
    for one, other in ((ref, run), (run, ref)):
        for names in one.head.ties:
            if set(names) <= other.head.parameters.keys() and set(names) not in map(set, other.head.ties):
                text = f"{listed(list(names))} are one parameter in {one.path}, and {len(names)} in {other.path}"
                yield f"{text} [{codes.UNTIED}]"


def _common_steps(ref: Recorded, run: Recorded) -> list[int]:
    steps = [step for step in ref.steps if step in run.steps]
    if not steps:
        text = f"{ref.path} has {steps_of(ref.steps)} and {run.path} has {steps_of(run.steps)}: none in common"
        raise BadFile(text + resuming.suggestion(ref, run))
    return steps


def _incomplete(ref: Recorded, run: Recorded, steps: Sequence[int]) -> Iterator[str]:
    sides = ((side.head, side.shift, one) for side in (ref, run) for one in side.ranks if not one.is_complete)
    for head, shift, one in sides:
        last = max((seen.n for seen in one.events.get(steps[-1], ())), default=0)
        wanted = [step for step in head.steps if step not in one.events]
        where = f"it ended in step {wanted[0] + shift}" if wanted else "it was not closed"
        yield f"{one.folder} is incomplete ({where}); compared up to event {last}"


def _refuse_other_models(pair: Pair) -> None:
    if not {name for _, name in pair.run.first} & {name for _, name in pair.ref.first}:
        ref, run = pair.ref.recorded, pair.run.recorded
        raise BadFile(f"{ref.path} and {run.path} share no parameter name: they are of different models")


def _other_data(pair: Pair) -> str:
    ref, run = pair.ref.recorded, pair.run.recorded
    mine = {row for own in pair.run.rows.values() for row in own}
    other = {row for own in pair.ref.rows.values() for row in own}
    if not mine or not other or mine == other:
        return ""
    lacking, whose, where = (other - mine, ref, run) if other - mine else (mine - other, run, ref)
    count = f"{len(lacking)} of {len(other if whose is ref else mine)} sequences of {whose.path}"
    steps = f"step {pair.step}" + (f" of RUN, step {pair.step + ref.shift} of REF" if ref.shift else "")
    return f"{steps}: {count} are not in {where.path}: the runs read different data"


# Text ---------------------------------------------------------------------------------------


def render(found: Comparison) -> str:
    """Return the comparison in lines."""
    sides = [f"{name} {_ranks(one)}" for name, one in (("REF", found.ref), ("RUN", found.run))]
    steps = steps_of(found.steps)
    if found.ref.shift:
        aligned = steps_of([step + found.ref.shift for step in found.steps])
        steps += f" of RUN {'are' if len(found.steps) > 1 else 'is'} {aligned} of REF"
    lines = [f"{', '.join(sides)}; {steps}, {found.compared:,} tensors, {_rows(found)} in step {found.steps[-1]}"]
    if abs(found.factor - 1) > numerics.ONE_FACTOR:
        lines.append(f"losses and gradients before their reduction are compared as {found.factor:.4g} x the run's")
    if found.resumption is not None:
        lines += found.resumption.lines
    if not found.divergent:
        other = "" if found.agrees else "other "
        lines.append(f"no {other}divergence (largest distance {found.largest:.1g})")
        if found.slack > numerics.WIDE:
            wide = f"{found.slack:.0%} ({numerics.RUNS_EPS:g} eps of the narrowest dtype of the steps)"
            lines.append(f"not judged: differences below {wide}: record both in float32, or give --noise")
            text = "not judged: whether ranks that hold the same elements have equal bits; the doctor does"
            lines.append(f"{text} [{codes.EQUAL_PARAMETERS}]")
    groups: dict[tuple[int, Stage, str, tuple[str, ...]], list[DivergentEvent]] = {}
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


def _rows(found: Comparison) -> str:
    if found.has_other_data:
        return "other data"
    return f"the same {found.rows[0]} sequences" if found.rows[0] else "inputs without rows"


def text_of(one: DivergentEvent) -> str:
    """Return a divergence in lines that are printable."""
    return "\n".join(map(printable, _lines_of(one)))


def _lines_of(one: DivergentEvent) -> list[str]:
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
