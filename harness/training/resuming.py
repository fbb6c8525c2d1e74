"""The steps of a recording that are those of another: a training, and its resumption from a checkpoint.

The offset of two recordings is the step of the reference that is step 0 of the run. Data show it: the fingerprints of
the rows that both have read. Parameters before a step show it too; where these and the data differ, the data did not go
on from the checkpoint. Aligned steps show the rest of a checkpoint: the age of optimizer states, whether
moments go on, and the settings of groups, which a scheduler sets.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from shardproof.door import BadFile
from shardproof.harness.judging import numerics
from shardproof.harness.judging.finding import Stage
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.alignment import RecordedStep
from shardproof.harness.training.findings import listed
from shardproof.harness.training.pairs import Pair
from shardproof.harness.training.recording import Recorded
from shardproof.harness.watching.optimizers import AGE

BY_DATA = "data"


class Aligned(NamedTuple):
    """The offset of a run's steps from a reference's.

    Attributes:
        offset: the step of the reference that is step 0 of the run.
        data: the same by the data that both have read; None where they do not say one.
    """

    offset: int
    data: int | None


def align(ref: Recorded, run: Recorded, wanted: str | int) -> Aligned:
    """Return the offset of two recordings.

    Args:
        wanted: the offset, or ``BY_DATA``.

    Raises:
        BadFile: no step of both has this offset, or the data do not have exactly one; in one line.
    """
    by_data = offsets_by_data(ref, run)
    if wanted != BY_DATA:
        return _given(ref, run, int(wanted), by_data)
    if not by_data:
        raise BadFile(
            f"--align data: {_of_both(ref, run)}, and at no offset all common steps read the same data: record both "
            "with the same data, or give the offset, as in --align 4"
        )
    if len(by_data) > 1:
        raise BadFile(
            f"--align data: {_of_both(ref, run)}, and the data are the same at several offsets: give the right one of "
            f"{_listed(by_data)}, as in --align {by_data[-1]}"
        )
    found = _offset_by_parameters(ref, run, by_data[0])
    return Aligned(by_data[0] if found is None else found, by_data[0])


def _given(ref: Recorded, run: Recorded, offset: int, by_data: Sequence[int]) -> Aligned:
    possible = _offsets(ref, run)
    if offset not in possible:
        right = f"expected {_listed(possible)}" if possible else "none is in both"
        raise BadFile(f"--align {offset}: {_of_both(ref, run)}, and none would be in common: {right}")
    if offset in by_data:
        return Aligned(offset, offset)
    return Aligned(offset, by_data[0] if len(by_data) == 1 else None)


def _of_both(ref: Recorded, run: Recorded) -> str:
    return f"{ref.path} has {steps_of(ref.steps)} and {run.path} has {steps_of(run.steps)}"


def _listed(offsets: Sequence[int]) -> str:
    """Return offsets for a message: a range, if they are one."""
    if len(offsets) > 2 and offsets[-1] - offsets[0] == len(offsets) - 1:
        return f"{offsets[0]} to {offsets[-1]}"
    return " or ".join(map(str, offsets[:8])) + f" and {len(offsets) - 8} more" * (len(offsets) > 8)


def steps_of(steps: Sequence[int]) -> str:
    """Return the numbers of steps in words."""
    if not steps:
        return "no step that all ranks have ended"
    is_range = len(steps) > 1 and list(steps) == list(range(steps[0], steps[-1] + 1))
    return f"steps {steps[0]}-{steps[-1]}" if is_range else f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"


def suggestion(ref: Recorded, run: Recorded) -> str:
    """Return what to add to a line which says that data differ: that they are those of other steps; else empty."""
    found = offsets_by_data(ref, run)
    same = (step for step in _common(ref, run, 0) if _united(_reads(ref, step)) == _united(_reads(run, step)))
    if len(found) != 1 or any(True for _ in same):
        return ""
    steps = _common(ref, run, found[0])
    which = steps_of([step + found[0] for step in steps])
    return f"; {run.path} reads the data of {ref.path}'s {which}: compare --align data"


# By data ------------------------------------------------------------------------------------


def offsets_by_data(ref: Recorded, run: Recorded) -> list[int]:
    """Return the offsets at which all common steps read the same rows; in the same microbatches, if some do."""
    steps = {(id(one), step): _reads(one, step) for one in (ref, run) for step in one.steps}

    def fits(offset: int, *, in_parts: bool) -> bool:
        sides = [(steps[id(ref), step + offset], steps[id(run), step]) for step in _common(ref, run, offset)]
        return all(a and (a == b if in_parts else _united(a) == _united(b)) for a, b in sides)

    alike = [offset for offset in _offsets(ref, run) if fits(offset, in_parts=False)]
    exact = [offset for offset in alike if fits(offset, in_parts=True)]
    return exact or alike


_Reads = dict[int, set[object]]
"""By microbatch, what stands for the rows that ranks read."""


def _reads(recorded: Recorded, step: int) -> _Reads:
    """Return what a step reads: hashes of rows, or the bits of inputs that have none."""
    found: _Reads = {}
    for own in recorded.ranks:
        inputs = [one for one in own.events[step] if one.stage is Stage.INPUT]
        has_rows = any(one.rows for one in inputs)
        for one in inputs:
            marks: Collection[object] = one.rows if has_rows else [(one.index, one.value.bits)]
            found.setdefault(one.microbatch, set()).update(marks)
    return found


def _united(reads: _Reads) -> set[object]:
    return set().union(*reads.values())


def _common(ref: Recorded, run: Recorded, offset: int) -> list[int]:
    """Return the steps of the run that the reference has too."""
    of_ref = set(ref.steps)
    return [step for step in run.steps if step + offset in of_ref]


def _offsets(ref: Recorded, run: Recorded) -> list[int]:
    """Return the offsets at which both have a step."""
    return sorted({a - b for a in ref.steps for b in run.steps})


# By parameters ------------------------------------------------------------------------------


def _offset_by_parameters(ref: Recorded, run: Recorded, by_data: int) -> int | None:
    """Return the offset at which the run begins with the reference's parameters; None if not exactly one fits."""
    first = _common(ref, run, by_data)[0]
    begins = RecordedStep(run, first)
    if _is_start(RecordedStep(ref, first + by_data), begins):
        return by_data
    found = [step - first for step in ref.steps if _is_start(RecordedStep(ref, step), begins)]
    return found[0] if len(found) == 1 else None


def _is_start(ref: RecordedStep, run: RecordedStep) -> bool:
    """Whether all parameters before the step are equal, as those of a checkpoint are, up to the rounding of sums."""
    both = [(ref.first.get(key), vector) for key, vector in run.first.items() if key[0] == "initial"]
    known = [(a, b) for a, b in both if a is not None and b is not None]
    return bool(known) and all(float((a - b).norm()) <= numerics.EQUAL_SKETCHES * float(a.norm()) for a, b in known)


# The rest of a checkpoint ----------------------------------------------------------------------


class _Side(NamedTuple):
    """A step of one of two recordings.

    Attributes:
        name: "REF" or "RUN".
        number: of the step, as the recording has it.
    """

    name: str
    step: RecordedStep
    number: int

    @classmethod
    def both(cls, pair: Pair) -> tuple["_Side", "_Side"]:
        """Return the sides of the reference and of the run."""
        sides = (("REF", pair.ref), ("RUN", pair.run))
        ref, run = (cls(name, step, pair.step + step.recorded.shift) for name, step in sides)
        return ref, run


def other_data(pair: Pair, aligned: Aligned | None) -> str:
    """Say which data the resumption reads, if the data of both fit at another offset than the steps; else empty."""
    if aligned is None or aligned.data is None or aligned.data == aligned.offset:
        return ""
    ref, run = _Side.both(pair)
    # The resumption is the one whose number is smaller.
    resumed, before, sign = (run, ref, 1) if aligned.offset >= 0 else (ref, run, -1)
    return _of_data(
        (resumed.name, resumed.number), (before.name, before.number), sign * aligned.offset, sign * aligned.data
    )


def _of_data(resumed: tuple[str, int], before: tuple[str, int], offset: int, data: int) -> str:
    """Say of which step the resumption reads the data; each side has its name and the number of its step."""
    behind = offset - data
    what = f"are {abs(behind)} step{'s' * (abs(behind) != 1)} {'behind' if behind > 0 else 'ahead'}"
    return (
        f"data of {resumed[0]} {what if data else 'begin anew'}: its step {resumed[1]} reads the data of "
        f"{before[0]}'s step {resumed[1] + data} instead of step {before[1]}"
    )


def lines_of_data(ref: Recorded, run: Recorded, offset: int) -> list[str]:
    """Say which data a resumption reads, if they are not those of the aligned steps."""
    by_data = offsets_by_data(ref, run)
    reads = {step: (_reads(ref, step + offset), _reads(run, step)) for step in _common(ref, run, offset)}
    others = [step for step, (was, now) in reads.items() if was and now and _united(was) != _united(now)]
    if not others:
        return []
    step = others[0]
    if len(by_data) == 1 and step == run.steps[0]:
        return [_of_data(("RUN", step), ("REF", step + offset), offset, by_data[0])]
    return list(_of_other_rows(ref, run, step, offset))


def _of_other_rows(ref: Recorded, run: Recorded, step: int, offset: int) -> Iterator[str]:
    """Say how many rows of a step are others, on which ranks, and of which step they are."""
    was, now = _united(_reads(ref, step + offset)), _united(_reads(run, step))
    yield (f"data of RUN differ: its step {step} lacks {len(was - now)} of the {len(was)} rows of REF's step "
           f"{step + offset}, and has {len(now - was)} others")  # fmt: skip
    by_rank = zip(_rows_of_ranks(ref, step + offset), _rows_of_ranks(run, step), strict=False)
    apart = [rank for rank, (one, other) in enumerate(by_rank) if one != other]
    if len(ref.ranks) == len(run.ranks) and len(apart) < len(run.ranks):
        yield f"  {ranks_of(apart)} read{'s' * (len(apart) == 1)} other rows, and the others the same"
    if some := [number for number in ref.steps if _united(_reads(ref, number)) & now]:
        yield f"  these include rows of REF's {steps_of(some)}"


def _rows_of_ranks(recorded: Recorded, step: int) -> list[set[object]]:
    """Return the rows that each rank reads in a step."""
    return [_united(_reads(dataclasses.replace(recorded, ranks=[own]), step)) for own in recorded.ranks]


BY_STATES, BY_ROWS = "states", "data"


class Resumption:
    """The differences of aligned steps that a checkpoint makes, each of the first step that has it.

    Attributes:
        by_kind: the differences, by BY_ROWS, BY_STATES or the name of a setting.
    """

    def __init__(self) -> None:
        self.by_kind: dict[str, list[str]] = {}
        self._lacks: dict[str, None] = {}

    @property
    def lines(self) -> list[str]:
        """The differences."""
        return [line for lines in self.by_kind.values() for line in lines]

    def add(self, pair: Pair) -> None:
        """Add what a step shows."""
        ages = different_ages(pair)
        self.add_lines(BY_STATES, [*ages, *_with_ages(pair)] if ages else list(_moments(pair)))
        values = [_settings_of(side.step) for side in _Side.both(pair)]
        self._lacks |= {str(side.recorded.path): None for side, own in zip((pair.ref, pair.run), values, strict=True)
                        if not own}  # fmt: skip
        for key in dict.fromkeys(key for own in values for key, _, _ in own):
            self.add_lines(key, list(_of_setting(pair, key, *values)))

    def notes(self) -> Iterator[str]:
        """Say what the recordings do not have."""
        for path in self._lacks:
            yield f"not compared: learning rates and other settings, which {path} lacks: record it anew"

    def add_lines(self, kind: str, lines: list[str]) -> None:
        """Add differences of a kind, of which those of an earlier step stay."""
        if lines:
            self.by_kind.setdefault(kind, lines)


_Values = dict[tuple[str, str, int], tuple[float, ...]]
"""By key, parameter and rank, the value of a setting, or the age."""


def _ages_of(step: RecordedStep) -> _Values:
    """Return how often optimizers have stepped each parameter; nothing of one whose optimizer does not count."""
    found: _Values = {}
    for rank, own in enumerate(step.recorded.ranks):
        for name, line in own.stepped.get(step.evidence.step, {}).items():
            age = (line.age,) if line.age is not None else line.settings.get(AGE)
            if age:
                found[AGE, name, rank] = tuple(age)
        for one in step.seen[rank]:
            is_age = one.stage is Stage.OPTIMIZER_STATE and one.state == AGE and one.value.numel == 1
            if is_age and 0 <= one.value.squares < math.inf:
                found[AGE, one.parameter, rank] = (round(math.sqrt(one.value.squares)),)
    return found


def _settings_of(step: RecordedStep) -> _Values:
    """Return the settings by which optimizers have stepped parameters."""
    return {
        (key, name, rank): tuple(value)
        for rank, own in enumerate(step.recorded.ranks)
        for name, line in own.stepped.get(step.evidence.step, {}).items()
        for key, value in line.settings.items()
        if key != AGE
    }


def _different(
    pair: Pair, ref: _Values, run: _Values, key: str
) -> Iterator[tuple[tuple[float, ...], tuple[float, ...], str]]:
    """Yield each pair of values that differ, of the reference and of the run, and which parameters have them."""
    firsts = {name: value for (of, name, _), value in reversed(ref.items()) if of == key}
    compared = {name for of, name, _ in run if of == key and name in firsts}
    found: dict[tuple[tuple[float, ...], tuple[float, ...]], tuple[dict[str, None], set[int]]] = {}
    for (of, name, rank), mine in run.items():
        if of != key or name not in compared:
            continue
        other = ref.get((key, name, pair.peer(rank)), firsts[name])
        if not _is_same(mine, other):
            names, ranks = found.setdefault((other, mine), ({}, set()))
            names[name] = None
            ranks.add(rank)
    for (other, mine), (names, ranks) in found.items():
        which = f"all {len(names)} parameters" if len(names) == len(compared) else listed([*names])
        where = "" if len(ranks) == len(pair.run.seen) else f" on {ranks_of(sorted(ranks))}"
        yield other, mine, f"{which}{where}"


def _is_same(mine: Sequence[float], other: Sequence[float]) -> bool:
    return len(mine) == len(other) and all(
        math.isclose(a, b, rel_tol=numerics.SAME_SETTING) for a, b in zip(mine, other, strict=True)
    )


def different_ages(pair: Pair) -> list[str]:
    """Say whether optimizers have stepped parameters another number of times."""
    ref, run = _Side.both(pair)
    lines = []
    for (other, *_), (mine, *_), which in _different(pair, _ages_of(pair.ref), _ages_of(pair.run), AGE):
        anew = _anew(ref, other, run, mine)
        if anew is None:
            text = f"ages of optimizer states differ: {mine:g} at RUN's step {run.number}, {other:g} at REF's step "
            lines.append(f"{text}{ref.number} ({which})")
            continue
        (side, age), (before, right) = anew
        text = f"optimizer states of {side.name} begin anew: age {age:g} at its step {side.number}, {before.name}'s are"
        lines.append(f"{text} {right:g} at step {before.number} ({which})")
    return [*lines[:_MOST_LINES], *[f"  and {len(lines) - _MOST_LINES} more"] * (len(lines) > _MOST_LINES)]


def _anew(ref: _Side, other: float, run: _Side, mine: float) -> tuple[tuple[_Side, float], tuple[_Side, float]] | None:
    """Return the side that has stepped in its recording alone, then the older one, each with its age; else None."""
    younger, older = ((run, mine), (ref, other)) if mine < other else ((ref, other), (run, mine))
    return (younger, older) if younger[1] <= younger[0].number + 1 else None


def _with_ages(pair: Pair) -> Iterator[str]:
    """Say whether the other states begin anew too."""
    begun = [
        f"  at {side.name}'s step {side.number} {text}" for side in _Side.both(pair) for text in _begun(pair, side)
    ]
    names = [name for name in pair.names("state") if name.partition(":")[2] != AGE]
    if begun or not names:
        yield from begun
    elif any((pair.worst("state", name) or 0.0) > 4 * pair.allowed for name in names):
        yield "  the other states differ too"
    elif pair.slack() <= numerics.WIDE:
        keys = {name.partition(":")[2]: None for name in names}
        yield f"  {listed([*keys])} agree: the counter alone differs"


def _moments(pair: Pair) -> Iterator[str]:
    """Say whether states that no counter shows to be new are."""
    for side in _Side.both(pair):
        for text in _begun(pair, side):
            yield f"optimizer states of {side.name} begin anew: at its step {side.number} {text}"


def _begun(pair: Pair, side: _Side) -> Iterator[str]:
    """Say which states are made of the gradient of the step alone, where the other side's are not."""
    rest = pair.ref if side.step is pair.run else pair.run
    found: dict[str, dict[str, bool]] = {}
    for name in pair.names("state"):
        parameter, _, key = name.partition(":")
        mine, other = (_beyond_gradient(step, name) for step in (side.step, rest))
        if mine is not None and other is not None and not pair.is_noise(parameter):
            near, size = _eps_of(side.step, name) * numerics.RUNS_EPS, 2 * numerics.RUNS_FACTOR
            found.setdefault(key, {})[parameter] = mine <= near and other > size * near
    for key, are in found.items():
        if names := [name for name, is_new in are.items() if is_new]:
            whose = f"all {len(names)} parameters" if len(names) == len(are) else listed(names)
            yield f"{key!r} is made of the gradient of that step alone ({whose})"


def _beyond_gradient(step: RecordedStep, name: str) -> float | None:
    """Return the part of a state that is no multiple of the gradient or, as of weight decay, of the parameter."""
    parameter = name.partition(":")[0]
    state = step.first.get(("state", name))
    parts = [step.first.get((field, parameter)) for field in ("at_step", "initial")]
    known = [one for one in parts if one is not None]
    if state is None or len(known) < len(parts) or math.prod(step.shape("state", name)) <= len(known):
        return None
    matrix = torch.stack(known, 1)
    if not bool(matrix.isfinite().all() and state.isfinite().all() and state.any()):
        return None
    weights = torch.linalg.lstsq(matrix, state[:, None]).solution.squeeze(1)
    return float((matrix @ weights - state).norm()) / float(state.norm())


def _eps_of(step: RecordedStep, name: str) -> float:
    """Return the spacing at 1 of the narrower dtype of a state and of the gradient."""
    parameter = name.partition(":")[0]
    held = [(one.state.get(name), one.at_step.get(parameter)) for one in step.gradients]
    return max(numerics.EPS.get(one.dtype, 1.0) for own in held for one in own if one is not None)


def _of_setting(pair: Pair, key: str, of_ref: _Values, of_run: _Values) -> Iterator[str]:
    """Say whether a setting differs, and whether it is that of the other recording's step of the same number."""
    ref, run = _Side.both(pair)
    word = "learning rate" if key == "lr" else key
    for other, mine, which in [*_different(pair, of_ref, of_run, key)][:_MOST_LINES]:
        resumed, before = ((run, mine), (ref, other)) if run.number <= ref.number else ((ref, other), (run, mine))
        was = _value_at(before[0].step.recorded, resumed[0].number, key)
        text = f"{word} of {resumed[0].name} "
        is_anew = was is not None and _is_same(was, resumed[1])
        text += "begins anew" if is_anew else "differs"
        text += f": {_shown(resumed[1])} at its step {resumed[0].number}"
        text += f", as {before[0].name}'s at step {resumed[0].number}" if is_anew else ""
        yield f"{text}; {before[0].name}'s is {_shown(before[1])} at step {before[0].number} ({which})"


def _value_at(recorded: Recorded, number: int, key: str) -> tuple[float, ...] | None:
    """Return a setting in the step of this number, of the first parameter that has it."""
    lines = (own.stepped.get(number - recorded.shift, {}).values() for own in recorded.ranks)
    return next((tuple(line.settings[key]) for own in lines for line in own if key in line.settings), None)


def _shown(value: Sequence[float]) -> str:
    return ", ".join(f"{one:.6g}" for one in value)


#: The most lines of one kind.
_MOST_LINES = 3
