"""Compares a resumed training with the run that went on: stages, in the order in which a resumption has them.

States are compared bit by bit, whatever the ranks and the mesh: a load copies. Steps are compared as recordings are.
They show which data are read, by which settings optimizers step, and whether anything depends on other generators.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardproof import door
from shardproof.door import BadFile, printable
from shardproof.harness.judging import numerics
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.states import comparing as states
from shardproof.harness.states import sides
from shardproof.harness.states.differences import Difference, hashes_of
from shardproof.harness.states.sides import EntryKey, State
from shardproof.harness.states.snapshot import MODEL, OPTIMIZER
from shardproof.harness.states.snapshot import SCHEDULER as OBJECTS
from shardproof.harness.training import comparing, recording, resuming
from shardproof.harness.training.alignment import name_of_seen
from shardproof.harness.training.comparing import Comparison
from shardproof.harness.training.findings import listed
from shardproof.harness.training.pairs import what
from shardproof.harness.training.recording import RecordedEvent
from shardproof.harness.training.request import Request

RUN, AGAIN = "run", "again"
"""The run that is saved and goes on, and the training that is resumed."""

SCHEDULER, LOADER = "scheduler", "loader"
"""Objects that steps judge: a scheduler of the learning rate by the rates, and a loader by the rows."""

SAVING, PARAMETERS, BUFFERS, MOMENTS, COUNTERS = "save()", "parameters", "buffers", "moments", "step counters"
DATA, RANDOM, RATES, SETTINGS, STEPS = "data position", "random numbers", "learning rates", "settings", "steps"

_WENT_ON, _RESUMED = "the run that went on", "the resumed run"

#: Entries of a scheduler that tell how far it is.
_EPOCH = "last_epoch"


class Lost(NamedTuple):
    """A stage that a resumption has otherwise.

    Attributes:
        stage: the first of these names that fits, or that of an object.
    """

    stage: str
    lines: list[str]


@dataclasses.dataclass
class Answer:
    """The verdict on a resumption.

    Attributes:
        lost: the stages that differ, the first of them first.
        own: what the run file has of it.
    """

    lost: list[str]
    text: str
    own: dict[str, Any]


class _Rank(NamedTuple):
    """What a rank has written at the end."""

    generators: Sequence[Mapping[str, Mapping[str, str]]]
    objects: Mapping[str, str]
    start: int | None
    narrow: Mapping[str, str]


def judge(folder: Path, request: Request) -> Answer:
    """Return what the second part has otherwise than the first, of which all ranks have written their files."""
    return _Judge(folder, request).answer()


class _Judge:
    def __init__(self, folder: Path, request: Request) -> None:
        self._folder, self._request, self._after = folder, request, request.save_and_resume
        self._ref, self._again = recording.read(folder / RUN), recording.read(folder / AGAIN)
        self._of_run = [_of_rank(folder, RUN, rank) for rank in range(len(self._ref.ranks))]
        self._resumed = [_of_rank(folder, AGAIN, rank) for rank in range(len(self._again.ranks))]
        self._compared = 0
        self._notes: list[str] = []

    @property
    def _is_as_wide(self) -> bool:
        return len(self._of_run) == len(self._resumed)

    def answer(self) -> Answer:
        lost = [*self._by_states()]
        data = resuming.lines_of_data(self._ref, self._again, self._after)
        start = self._resumed[0].start
        if start is not None and start != self._after:
            data.append(f"  load() returned step {start}, and the run had made {self._after} steps when it was saved")
        lost += [Lost(DATA, data)] if data else []
        found = self._comparison()
        bits = self._first_other_bits() if self._is_as_wide else None
        random = self._random() if self._is_as_wide and bits is not None else []
        lost += [Lost(RANDOM, random)] if random else []
        lost += self._by_steps(found, has_cause=bool(lost)) if found is not None else []
        self._compared += found.compared if found is not None else 0
        self._notes = [] if lost else [*(found.notes if found is not None else ()), *self._notes]
        return self._answered(lost, found, bits)

    def _answered(self, lost: Sequence[Lost], found: Comparison | None, bits: str | None) -> Answer:
        request = self._request
        lines = [line for one in lost for line in one.lines] or [self._agreement(found, bits)]
        own = {
            "model": request.model, "mesh": dict(request.mesh), "data": list(request.data_dims), "lines": lines,
            "compared": self._compared, "notes": self._notes,
        }  # fmt: skip
        if not lost:
            return Answer([], "", own)
        head, *rest = lost
        text = [f"{request.model}, {request.implementation}, mesh {request.mesh_text}, resumed after {self._after} "
                f"steps: {head.stage}: {head.lines[0]}", *head.lines[1:]]  # fmt: skip
        for one in rest:
            text += [f"then {one.stage}: {one.lines[0]}", *one.lines[1:]]
        if any("REF" in line for line in text):
            text.append(f"REF is {_WENT_ON}, whose step {self._after} is step 0 of RUN, {_RESUMED}")
        first, *more = text
        return Answer(
            [one.stage for one in lost], printable(first) + "".join(f"\n  {printable(one)}" for one in more), own
        )

    # States ---------------------------------------------------------------------------------

    def _state(self, name: str, whose: str) -> State:
        found = sides.read(str(self._folder / "states" / name))
        found.path = whose
        return found

    def _by_states(self) -> Iterator[Lost]:
        """Yield what saving has changed, and what loading has not restored."""
        before = self._state(f"step{self._after}", _WENT_ON)
        self._compared += len(before.entries)
        saved = states.compare(before, self._state("saved", "the training after save()"))
        changed = [one for one in saved if one.key.section in (MODEL, OPTIMIZER) or before.entries[one.key].is_tensor]
        if changed:
            yield Lost(
                SAVING, ["it changed the training that it saves", *(f"  {one}" for one in states.lines(changed))]
            )
        after = self._state("resumed", _RESUMED)
        found = states.compare(before, after)
        if not found:
            return
        others = [*range(self._after), *range(self._after + 1, self._after + self._request.steps + 1)]
        earlier = [self._state(f"step{step}", _WENT_ON) for step in reversed(others)]
        yield from self._lost(before, after, earlier, passing={one.key for one in saved})

    def _lost(
        self, before: State, after: State, earlier: Sequence[State], *, passing: set[EntryKey]
    ) -> Iterator[Lost]:  # fmt: skip
        """Yield what loading has not restored; values of objects that change by themselves are no part of it."""
        found = states.compare(before, after, earlier=earlier)
        later = states.compare(self._state(f"step{self._after + 1}", _WENT_ON), self._state("after1", _RESUMED))
        lasting = {one.key for one in later if not _is_rounding(one, before)}
        by_stage: dict[str, list[Difference]] = {}
        for one in found:
            stage = self._stage_of(one, before)
            if stage and one.key in lasting and (one.key not in passing or one.key.section != OBJECTS):
                by_stage.setdefault(stage, []).append(one)
        order = [PARAMETERS, BUFFERS, MOMENTS, COUNTERS, *self._of_run[0].objects]
        for stage in sorted(by_stage, key=lambda one: order.index(one) if one in order else len(order)):
            yield Lost(stage, self._lines_of(by_stage[stage], before, after, earlier))

    def _stage_of(self, one: Difference, before: State) -> str:
        """Return the stage of a difference; none where steps judge it."""
        key = one.key
        if key.section == MODEL:
            entry = before.entries.get(key)
            return BUFFERS if entry is not None and entry.kind == "buffer" else PARAMETERS
        if key.section == OPTIMIZER:
            return "" if key.name.startswith("group ") else COUNTERS if key.key == "step" else MOMENTS
        name = key.name.partition(".")[0]
        if self._of_run[0].objects.get(name) != SCHEDULER:
            return name
        if key.name == f"{name}.{_EPOCH}":
            self._notes.append(f"whether {name} goes on: last_epoch {one.text}, and the rates of these steps agree. "
                               "Meant? then its function counts from the checkpoint on")  # fmt: skip
        return ""

    def _lines_of(
        self, found: Sequence[Difference], before: State, after: State, earlier: Sequence[State]
    ) -> list[str]:  # fmt: skip
        lines = [line.partition(": ")[2] for line in states.lines(found)]
        if group := _group_of({one.key.name for one in found}, before):
            lines.append(f"  these are all parameters of {group}")
        keys = [str(one.key) for one in found]
        dtypes = Counter(of.narrow[name] for name in keys for of in self._resumed if name in of.narrow)
        if dtypes and all(one.kind == "values" for one in found):
            lines.append(f"  {_RESUMED} has values of {dtypes.most_common(1)[0][0]} there")
        lines += [f"  {line}" for line in _stale_parts(found, before, after, earlier)]
        return [lines[0], *(line if line.startswith("  ") else f"  {line}" for line in lines[1:])]

    # Steps ----------------------------------------------------------------------------------

    def _comparison(self) -> Comparison | None:
        """Compare the recordings; None where they read different data."""
        try:
            return comparing.compare(self._ref, self._again, align=self._after)
        except BadFile:
            return None

    def _by_steps(self, found: Comparison, *, has_cause: bool) -> Iterator[Lost]:
        by_kind = found.resumption.by_kind if found.resumption is not None else {}
        for kind, lines in by_kind.items():
            if kind not in (resuming.BY_ROWS, resuming.BY_STATES):
                yield Lost(RATES if kind == "lr" else SETTINGS, lines)
                has_cause = True
        if not has_cause and resuming.BY_STATES in by_kind:
            yield Lost(MOMENTS, by_kind[resuming.BY_STATES])
            has_cause = True
        if has_cause or not found.divergent:
            return
        if not self._is_as_wide and self._uses_generators():
            self._notes.append("the steps after load(): they draw random numbers, on another number of ranks")
            return
        first = found.divergent[0]
        text = comparing.text_of(first).splitlines()
        yield Lost(f"{STEPS}, {first.stage.value}", [
            f"rank {first.rank} first diverges at {text[0]}", *text[1:],
            "  the state after load(), data and settings agree: steps depend on what is in none of model, optimizer, "
            "and objects()",
        ])  # fmt: skip

    def _uses_generators(self) -> bool:
        return any(one["begin"] != one["end"] for rank in self._of_run for one in rank.generators)

    def _random(self) -> list[str]:
        """Say which generators, that steps draw from, are not those of the run."""
        causes: dict[tuple[str, str], list[int]] = {}
        for rank, (mine, its) in enumerate(zip(self._resumed, self._of_run, strict=True)):
            now, was = mine.generators[0], its.generators[self._after]
            for name, state in was["begin"].items():
                is_used = any(one["begin"][name] != one["end"][name] for one in its.generators[self._after :])
                is_lost = now["begin"].get(name) != state and now["end"].get(name) != was["end"][name]
                if is_used and is_lost:
                    cause = self._source_of(now["begin"].get(name, ""), name, rank)
                    causes.setdefault((name, cause), []).append(rank)
        lines = []
        for (name, cause), ranks in causes.items():
            where = "each rank" if len(ranks) == len(self._resumed) else ranks_of(ranks)
            lines.append(f"the generator of {name} on {where} is not that of step {self._after}: {cause}")
        return lines and [lines[0], *(f"  {line}" for line in lines[1:])]

    def _source_of(self, state: str, name: str, rank: int) -> str:
        """Say which generator of the run a state is that of."""
        for step, one in enumerate(self._of_run[rank].generators):
            if one["begin"].get(name) == state:
                return "it begins anew, as that of step 0" if step == 0 else f"it is that of step {step}"
        for other, its in enumerate(self._of_run):
            if its.generators[self._after]["begin"].get(name) == state:
                return f"it is that of rank {other}"
        return "no rank of the run has had its state before a step"

    def _first_other_bits(self) -> str | None:
        """Return the first tensor of the steps that has other bits on the same rank; None if there is none."""
        for step in self._again.steps:
            for rank, (mine, its) in enumerate(zip(self._again.ranks, self._ref.ranks, strict=True)):
                was = {_key_of(one): one.value.bits for one in its.events.get(step + self._after, ())}
                for one in mine.events[step]:
                    if was.get(_key_of(one)) != one.value.bits:
                        name = what(one.stage, name_of_seen(one) or one.module)
                        return f"{name} on rank {rank} in step {step + self._after}"
        return None

    def _agreement(self, found: Comparison | None, bits: str | None) -> str:
        """Say how well steps agree."""
        if self._is_as_wide and bits is None:
            return "the state after load() and all steps are equal bit by bit"
        first = f"; the first tensor that is not equal bit by bit is {bits}" if bits else ""
        distance = found.largest if found is not None else 0.0
        return f"the state after load() is equal bit by bit, steps are within {distance:.1g}{first}"


def _of_rank(folder: Path, part: str, rank: int) -> _Rank:
    def decoded(found: Any) -> _Rank:
        return _Rank(found["generators"], found["objects"], found.get("start"), found.get("narrow", {}))

    return door.load(folder / f"{part}-rank{rank}.json", decoded)


def _key_of(seen: RecordedEvent) -> tuple[Any, ...]:
    return (seen.stage, seen.module, seen.parameter, seen.microbatch, seen.call, seen.index, seen.state)


def _is_rounding(one: Difference, state: State) -> bool:
    """Whether a difference is no more than sums in another order make."""
    entry = state.entries.get(one.key)
    eps = numerics.EPS.get(entry.dtype, 0.0) if entry is not None else 0.0
    return one.kind == "values" and one.distance <= numerics.RUNS_EPS * eps


def _stale_parts(
    found: Sequence[Difference], before: State, after: State, earlier: Sequence[State]
) -> Iterator[str]:  # fmt: skip
    """Say which ranks have shards of another step of the run, of tensors that are not those of that step everywhere."""
    causes: dict[str, list[str]] = {}
    for one in found:
        was, now = before.entries.get(one.key), after.entries.get(one.key)
        if one.kind == "stale" or was is None or now is None:
            continue
        known = {part.box: hashes_of(part.sums) for part in was.held}
        for part in (part for part in now.held if known.get(part.box, ()) != hashes_of(part.sums)):
            for state in earlier:
                its = state.entries[one.key].held if one.key in state.entries else ()
                if any(hashes_of(other.sums) == hashes_of(part.sums) and other.box == part.box for other in its):
                    cause = f"on {part.source}: that of {state.path}, after step {state.step}"
                    causes.setdefault(cause, []).append(str(one.key))
                    break
    for cause, names in causes.items():
        yield f"{cause} ({listed([*dict.fromkeys(names)])})"


def _group_of(names: set[str], state: State) -> str:
    """Return the only group of an optimizer whose parameters have these names, if there are others."""
    groups: dict[str, set[str]] = {}
    for key, entry in state.entries.items():
        if entry.stepped_by:
            groups.setdefault(entry.stepped_by, set()).add(key.name)
    return next((group for group, its in groups.items() if its == names), "") if len(groups) > 1 else ""
