"""What holds in each right training, whatever it computes. Each check takes the evidence of one step."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardproof.harness.collectives.trace import Trace, first_difference
from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.signatures import fit
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.evidence import Evidence, Start, vector_of
from shardproof.harness.training.findings import DoctorFinding, listed
from shardproof.harness.watching.groups import ITERABLE
from shardproof.harness.watching.records import Parameter, StepRecord

#: The title of the finding of a NaN or an infinity.
NOT_FINITE = "a tensor is not finite"

#: The title of the finding that replicas differ before the first step.
APART_AT_THE_START = "replicas differ when training begins"

#: How the line begins that tells of the seeds of ranks.
SEEDS = "seen: the seeds of these ranks differ"

#: The title of the finding that ranks of one data-parallel rank read different data.
APART = "model-parallel ranks read different data"

#: The title of the finding that data-parallel ranks read the same data.
SAME = "ranks read the same data"

#: The title of the note of ranks that read the same data, and seem to hold parts of one model.
SAME_OF_PARTS = "ranks with parameters of their own read the same data"

#: Of ranks that read the same and compute other gradients: dropout explains it, or the loop draws something else.
_UNDER_DROPOUT = "their gradients differ by dropout"
_FROM_THE_SAME = (
    "their gradients differ: meant, as where each rank draws its own actions, noise or labels for the same inputs? "
    "then leave it"
)

#: Of inputs that are the same in all steps too.
_DRAWN = " for which each rank draws its own actions, noise or labels"

#: Where no loader tells why ranks read the same.
_NO_LOADER = "no DataLoader was seen: each rank must read its own part of the data"

#: The title of the finding that the gradients of replicas differ.
DIFFER = "replicas differ"

#: The title of the note of gradients that are dropped in one step.
DROPPED = "gradients are dropped without a step"


def check_start(starts: Sequence[Start], differ: Mapping[str, Sequence[tuple[int, ...]]]) -> Iterator[DoctorFinding]:
    """D1 before the first step: declared replicas are equal."""
    if differ:
        names = list(differ)
        members = differ[names[0]][0]
        lines = [f"{listed(names)}: {ranks_of(members)} hold the same elements and have different values"]
        seeds = dict.fromkeys(starts[rank].seed for rank in members)
        if len(seeds) > 1:
            lines.append(f"{SEEDS} ({', '.join(map(str, list(seeds)[:4]))})")
        lines.append("give each the values of one rank: broadcast them, or build and load the model alike on each")
        yield DoctorFinding((codes.EQUAL_PARAMETERS,), codes.APART, 0, APART_AT_THE_START, tuple(lines))


_Sets = dict[str, list[tuple[int, ...]]]
"""By parameter, the sets of ranks that hold the same elements of it and differ."""


@dataclasses.dataclass
class _Apart:
    """The replicas that differ in a step.

    Attributes:
        partly: of which some have a gradient, and others none.
        gradients: whose gradients differ.
        distance: of those, the largest relative distance by parameter.
        after: whose parameters differ after the step.
    """

    evidence: Evidence
    partly: _Sets = dataclasses.field(default_factory=dict)
    gradients: _Sets = dataclasses.field(default_factory=dict)
    distance: dict[str, float] = dataclasses.field(default_factory=dict)
    after: _Sets = dataclasses.field(default_factory=dict)

    @property
    def drifted(self) -> set[str]:
        """The parameters that differ after the step, as their gradients do."""
        return {name for name in self.after if name in self.gradients or name in self.partly}

    def take(self, name: str, members: tuple[int, ...]) -> None:
        """Compare what ranks hold that are to hold the same elements."""
        evidence = self.evidence
        if len(values(evidence, name, members)) > 1:
            self.after.setdefault(name, []).append(members)
        if evidence.reduces_in_step:
            return
        present = [one for rank in members if (one := evidence.gradients[rank].at_step.get(name)) is not None]
        if present and len(present) < len(members):
            self.partly.setdefault(name, []).append(members)
        elif len({one.fingerprint.identity for one in present if not one.pending}) > 1:
            self.gradients.setdefault(name, []).append(members)
            vectors = [vector_of(one) for one in present]
            largest = max(float((vectors[0] - one).norm()) for one in vectors)
            relative = largest / max(float(vectors[0].norm()), 1e-300)
            self.distance[name] = max(self.distance.get(name, 0.0), relative)


def check_replicas(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D1 and D2: ranks that hold the same elements have equal gradients and parameters.

    Where the step has moved parameters and they are equal after it, it has gathered what differs before: gradients and
    states are sharded. Where it reduces gradients by itself, they may differ when it begins.
    """
    apart = _Apart(evidence)
    for name, sets in evidence.holders.items():
        for members in sets:
            if len(members) > 1 and not evidence.are_gathered(name, members):
                apart.take(name, members)
    for alike, names in by_sets(apart.partly):
        yield _of_partly(evidence, alike[0], names)
    drifted = apart.drifted
    for alike, names in by_sets(apart.gradients):
        yield _of_gradients(evidence, alike, names, max(apart.distance[name] for name in names), drifted)
    rest = {name: sets for name, sets in apart.after.items() if name not in drifted and name not in apart.gradients}
    for alike, names in by_sets(rest):
        yield _of_parameters(evidence, alike, names)


def _of_partly(evidence: Evidence, members: Sequence[int], names: list[str]) -> DoctorFinding:
    """Make the finding of replicas of which some have no gradient."""
    without = [rank for rank in members if names[0] not in evidence.gradients[rank].at_step]
    have = "has" if len(without) == 1 else "have"
    line = f"{listed(names)}: {ranks_of(members)} hold the same elements, and {ranks_of(without)} {have} no gradient"
    title = "replicas differ: some have no gradient"
    return DoctorFinding((codes.EQUAL_GRADIENTS,), codes.APART, evidence.step, title, (line,))


def _of_parameters(evidence: Evidence, alike: Sequence[tuple[int, ...]], names: list[str]) -> DoctorFinding:
    """Make the finding of replicas that differ after the step, and whose gradients do not."""
    of = named_sets(evidence, alike)
    lines = [f"parameter {listed(names)}: {of} hold the same elements and differ after the step"]
    has_gradient = names[0] in evidence.gradients[alike[0][0]].at_step
    states = [states_of(evidence, name, sets) for name in names for sets in alike]
    # Where the step reduces, gradients are not known; a rank that has no state leaves the work to others.
    is_of_states = has_gradient and not evidence.reduces_in_step and all(len(one - {()}) > 1 for one in states)
    if is_of_states:
        lines.append(
            "seen: their gradients are equal, and their optimizer states differ, as where one rank alone loads "
            "them: load the optimizer's state_dict() on each rank"
        )
    elif has_gradient and not any(len(one) > 1 for one in states):
        lines.append(_why_alone(evidence, alike[0], names[0]))
    title = "replicas differ after the step"
    return DoctorFinding(
        (codes.EQUAL_PARAMETERS,), codes.APART, evidence.step, title, tuple(lines), is_open=not is_of_states
    )


def check_states_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D3, after the last step: ranks that hold the same elements have equal optimizer states.

    A step that moves parameters to equal values from states that differ has ranks divide the work, and states with it.
    A step that moves nothing, as at the start of a warm-up or with gradients of zero, does not tell; of an optimizer
    that divides in another step nothing is said.
    """
    apart = _states_apart(records)
    for first in sorted({found[0][0].step for found in apart.values()}):
        now = {name: [one for one in found if one[0].step == first] for name, found in apart.items()}
        sets_of = {name: [members for _, members in found] for name, found in now.items() if found}
        evidence = next(found[0][0] for found in now.values() if found)
        for alike, names in by_sets(sets_of):
            of = named_sets(evidence, alike)
            line = f"state of {listed(names)}: {of} hold the same elements and have different states"
            yield DoctorFinding(
                (codes.EQUAL_STATES,), codes.APART, first, "optimizer states of replicas differ", (line,), is_open=True
            )


def _states_apart(records: Sequence[Evidence]) -> dict[str, list[tuple[Evidence, tuple[int, ...]]]]:
    """Return in which steps and on which ranks states of a parameter differ whose optimizer divides no work."""
    divided: set[int | None] = set()
    apart: dict[str, list[tuple[Evidence, tuple[int, ...]]]] = {}
    for evidence in records:
        for name, sets in evidence.holders.items():
            for members in sets:
                if len(members) < 2 or len(states := states_of(evidence, name, members)) < 2:
                    continue
                if evidence.are_gathered(name, members):
                    divided |= {_optimizer_of(evidence, name, members)}
                elif len(states - {()}) > 1:  # a rank that has none leaves the work to others
                    apart.setdefault(name, []).append((evidence, members))
    return {
        name: found
        for name, found in apart.items()
        if not {_optimizer_of(one, name, sets) for one, sets in found} & divided
    }


def _held(evidence: Evidence, name: str, members: Sequence[int]) -> list[Parameter]:
    """Return what ranks hold of a parameter, of those that hold some."""
    return [one for rank in members if (one := evidence.records[rank].parameters.get(name)) is not None]


def values(evidence: Evidence, name: str, members: Sequence[int], of: str = "after") -> set[Any]:
    """Return the different bits that ranks hold of a parameter, after the step or "before" it, as far as known."""
    return {bits for one in _held(evidence, name, members) if (bits := getattr(one, of)) is not None}


def states_of(evidence: Evidence, name: str, members: Sequence[int]) -> set[tuple[Any, ...]]:
    """Return the different optimizer states that ranks have of a parameter; empty for a rank that has none."""
    held = _held(evidence, name, members)
    return {tuple(sorted(one.state.items())) for one in held if one.optimizer is not None}


def _optimizer_of(evidence: Evidence, name: str, members: Sequence[int]) -> int | None:
    held = _held(evidence, name, members)
    return next((one.optimizer for one in held if one.optimizer is not None), None)


def _why_alone(evidence: Evidence, members: Sequence[int], name: str) -> str:
    """Say why replicas differ whose gradients and states are equal: their learning rates, where these are seen."""
    rates = {rank: one.lr for rank in members if (one := evidence.records[rank].parameters.get(name)) is not None}
    if None not in rates.values() and len(set(rates.values())) > 1:
        texts = ", ".join(f"{rate:.4g}" for rate in rates.values())
        return (
            f"the learning rate is {texts} on {ranks_of(list(rates))}: a scheduler that steps by a rank's own metric "
            "or count needs that of all ranks"
        )
    return "from equal gradients and optimizer states: another learning rate, or a write to it after the step before"


def _of_gradients(
    evidence: Evidence, members: Sequence[tuple[int, ...]], names: list[str], largest: float, drifted: set[str]
) -> DoctorFinding:
    """Make the finding of replicas whose gradients differ; by no more than rounding, it is a note."""
    # Elements that are rounded otherwise are the spacing of two numbers apart: half of it for each of the two.
    is_noise = largest < max(numerics.REPLICAS_NOISE, 2 * max(map(evidence.rounding, names)))
    lines = [
        f"gradient of {listed(names)}: {named_sets(evidence, members)} hold the same elements and have different bits "
        f"(relative distance {largest:.2g}; {len(names)} of {len(evidence.names)} parameters)"
    ]
    if is_noise:
        lines.append(
            "the difference is no more than rounding of all elements: kernels, or the order of sums, differ; or few "
            "elements differ by more"
        )
    else:
        lines += _why_replicas_differ(evidence, members[0], names)
    if drift := [name for name in names if name in drifted]:
        lines.append(f"the parameters drift apart: after the step {len(drift)} differ [{codes.EQUAL_PARAMETERS}]")
    return DoctorFinding(
        (codes.EQUAL_GRADIENTS,),
        codes.APART,
        evidence.step,
        DIFFER,
        tuple(lines),
        is_note=is_noise,
        is_open=not is_noise,
    )


@dataclasses.dataclass
class _Likeness:
    """What the gradients of replicas that differ are, as far as all of them are it.

    Attributes:
        ratios: by what each rank's are multiplied to be those of another one; empty texts for no factor.
        are_seen: whether it is known what the ranks computed.
        are_own: whether each rank has what it and its data-parallel ranks computed.
        are_alone: whether each rank has what it computed itself.
    """

    ratios: set[str] = dataclasses.field(default_factory=set)
    are_seen: bool = True
    are_own: bool = True
    are_alone: bool = True

    def take(self, evidence: Evidence, name: str, rank: int, other: int) -> None:
        """Compare a gradient on one rank with that of another, and with what ranks computed."""
        vector = vector_of(evidence.gradients[rank].at_step[name])
        factor, rest = fit(vector, vector_of(evidence.gradients[other].at_step[name]))
        allowed = max(numerics.ALIKE, evidence.tolerance(name))
        # Any two numbers are multiples of each other.
        is_number = evidence.numel(name) == 1
        self.ratios.add(f"{factor:.4g}" if rest < allowed and not is_number else "")
        both = evidence.computed(name, rank)
        self.are_seen &= both is not None
        self.are_own &= both is not None and _rest(*both, is_number) < allowed
        alone = [vector_of(one) for _, one in evidence.gradients[rank].own.get(name, [])]
        self.are_alone &= bool(alone) and _rest(vector, torch.stack(alone).sum(0), is_number) < allowed


def _rest(seen: torch.Tensor, parts: torch.Tensor, is_number: bool) -> float:
    """Return the relative distance of gradients that a factor leaves; of a number there is none."""
    return float((seen - parts).norm() / seen.norm()) if is_number else fit(seen, parts)[1]


def _why_replicas_differ(evidence: Evidence, members: Sequence[int], names: Sequence[str]) -> list[str]:
    """Say what the gradients of ranks that hold the same elements are: by a factor one another's, or each its own."""
    over = _where(evidence, members).strip(" ()") or "these ranks"
    are = _Likeness()
    for name in names:
        for rank in members:
            are.take(evidence, name, rank, members[0])
    if "" not in are.ratios and len(are.ratios) <= len(members):
        ratios = ", ".join(sorted(are.ratios))
        return [f"they are {ratios} x those of rank {members[0]}: each rank scales them by itself"]
    if not are.are_seen:
        return [f"the sum over {over} is missing, or something changes them on each rank after it"]
    if not are.are_own and are.are_alone:
        lines = [f"each rank has its own gradients: nothing has reduced them over {over}"]
        if "DistributedDataParallel" in evidence.starts[0].reducers.names:
            lines.append(
                "DistributedDataParallel reduces what required a gradient when it was made: unfreeze before that"
            )
        return lines
    if not are.are_own:
        return ["something changes them on each rank after they were reduced: they are not the rank's own gradients"]
    is_reduced = any(len(evidence.data_peers(rank)) > 1 for rank in members)
    itself = f"its own gradients{', reduced over its data-parallel ranks' if is_reduced else ''}"
    lines = [f"each rank has {itself}: if ranks compute parts of it, the sum over {over} is missing"]
    if evidence.records[members[0]].modules.has_dropout:
        lines.append(f"dropout is on: if ranks compute the same, their random numbers must be equal over {over}")
    return lines


def by_sets(found: Mapping[str, list[tuple[int, ...]]]) -> list[tuple[list[tuple[int, ...]], list[str]]]:
    """Group names by the sets of ranks in which they differ."""
    groups: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name, sets in found.items():
        groups.setdefault(tuple(sorted(set(sets))), []).append(name)
    # Of some parameters a few sets agree by chance, as small ones do after rounding.
    for few in sorted(groups, key=len):
        if more := next((one for one in groups if set(few) < set(one)), None):
            groups[more] += groups.pop(few)
    return [(list(sets), names) for sets, names in groups.items()]


def named_sets(evidence: Evidence, members: Sequence[tuple[int, ...]]) -> str:
    """Name sets of ranks: "ranks 0-1 (tp)", "ranks 0-1 and ranks 2-3 (tp)"."""
    shown = " and ".join(ranks_of(one) for one in members[:3])
    more = f" and {len(members) - 3} more sets" if len(members) > 3 else ""
    return f"{shown}{more}{_where(evidence, members[0])}"


def check_data(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D9: data ranks read different microbatches, ranks of one data rank the same, and none one twice."""
    batches = [record.forwards.batches for record in evidence.records]
    if not any(batches):
        return
    apart = [ranks for ranks in evidence.readers if _read_apart(evidence, ranks)]
    if apart:
        line = f"{named_sets(evidence, apart)} are parts of one model and read different microbatches"
        yield DoctorFinding((codes.DATA,), codes.SHARED_DATA, evidence.step, APART, (line,))
    same: dict[tuple[int, ...], list[int]] = {}
    for number, ranks in enumerate(evidence.readers):
        same.setdefault(batches[ranks[0]], []).append(number)
    for batch, numbers in same.items():
        if len(numbers) > 1 and batch:
            yield from _of_same(evidence, [evidence.readers[number] for number in numbers])
    yield from _read_twice(evidence.after_drops)


def _read_apart(evidence: Evidence, ranks: Sequence[int]) -> bool:
    """Whether ranks of one data rank read different microbatches, and no parts of one."""
    batches = [evidence.records[rank].forwards.batches for rank in ranks]
    return len(set(batches)) > 1 and all(batches) and not _divide_inputs(evidence, ranks)


def _of_same(evidence: Evidence, readers: Sequence[tuple[int, ...]]) -> Iterator[DoctorFinding]:
    """Find data ranks that read the same; a note where that may be meant, and nothing where it must be so."""
    ranks = sorted(rank for one in readers for rank in one)
    lines = [
        f"the {_named_readers(evidence, readers, ranks)} read the same data in the step",
        "each must read its own part: give the sampler the number of ranks and this rank",
    ]
    # Ranks that compute parts of one model read the same, and nothing tells that these do not.
    unlike = {} if evidence.are_readers_known else evidence.parts
    parts = [name for name in unlike if name not in evidence.starts[0].constant]
    if peers := [name for name in parts if _is_part_of_each(evidence, name, ranks)]:
        yield from _of_peers(evidence, ranks, peers)
        return
    is_note = bool(parts)
    if parts:
        lines.append(
            f"meant, as where ranks compute parts of one model ({listed(parts)} differ from the start)? then "
            'name the groups: doctor(model, groups={"dp": ..., "tp": ...})'
        )
    if why := _why_apart(evidence, readers, [name for name in evidence.trained if not parts or name not in unlike]):
        is_note |= why != _UNDER_DROPOUT
        lines.append(why)
    yield DoctorFinding((codes.DATA,), codes.SHARED_DATA, evidence.step, SAME, tuple(lines), is_note)


def _why_apart(evidence: Evidence, readers: Sequence[tuple[int, ...]], names: Sequence[str]) -> str:
    """Return the line about gradients that data ranks compute from the same; empty if these are the same too."""
    # Each with its own of the other data ranks: those of one data rank may compute parts of a gradient.
    if not any(_compute_apart(evidence, one, names) for one in zip(*readers, strict=False)):
        return ""
    has_dropout = any(evidence.records[rank].modules.has_dropout for one in readers for rank in one)
    return _UNDER_DROPOUT if has_dropout else _FROM_THE_SAME


def _named_readers(evidence: Evidence, readers: Sequence[tuple[int, ...]], ranks: Sequence[int]) -> str:
    """Name data ranks: "2 ranks of dp (ranks 0-1)", or with the ranks of each where these are several."""
    over = f" of {' and '.join(evidence.data_names)}" if evidence.data_names else ""
    if len(ranks) == len(readers):
        return f"{len(readers)} ranks{over} ({ranks_of(ranks)})"
    return f"{len(readers)} data-parallel ranks{over}, which are {named_sets(evidence, readers)},"


def _of_peers(evidence: Evidence, ranks: Sequence[int], names: list[str]) -> Iterator[DoctorFinding]:
    """Note, of ranks that began with values of their own and do not reduce them, that they read the same.

    Not of those that are seen to compute one model together.
    """
    if not _compute_copies_alike(evidence, ranks):
        line = (
            f"{ranks_of(ranks)} read the same data in the step, as ranks must that compute parts of one model: "
            f"{listed(names)} differ from the start, and are not reduced; name the groups: "
            'doctor(model, groups={"dp": ..., "tp": ...}), or give each rank data of its own'
        )
        yield DoctorFinding((codes.DATA,), codes.SHARED_DATA, evidence.step, SAME_OF_PARTS, (line,), is_note=True)


def _is_part_of_each(evidence: Evidence, name: str, ranks: Sequence[int]) -> bool:
    """Whether each rank began with values of its own of a parameter, and its gradient is what it computes alone."""
    if any(len(evidence.parts[name].get(rank, ())) != 1 for rank in ranks):
        return False
    computed = [evidence.computed(name, rank) for rank in ranks]
    return all(one is not None and fit(*one)[1] <= 8 * evidence.tolerance(name) for one in computed)


def _compute_copies_alike(evidence: Evidence, ranks: Sequence[int]) -> bool:
    """Whether ranks that hold parts of one model compute the same gradients of all else, of which each has a copy.

    By other layers they would not, unless they send each other what these return.
    """
    copies = [name for name in evidence.trained if name not in evidence.parts]
    has_some = any(
        float(vector_of(one).norm()) > 0 for name in copies for _, one in evidence.gradients[ranks[0]].own.get(name, [])
    )
    return has_some and not _compute_apart(evidence, ranks, copies)


def _compute_apart(evidence: Evidence, readers: Sequence[int], names: Iterable[str]) -> bool:
    """Whether ranks that read the same compute other gradients from it, as far as they compute those of the same."""
    distance = size = rounded = 0.0
    for name in names:
        own = [[one for _, one in evidence.gradients[rank].own.get(name, [])] for rank in readers]
        if len({tuple(one.box for one in mine) for mine in own}) != 1 or not own[0]:
            continue
        first, *rest = (torch.stack([vector_of(one) for one in mine]) for mine in own)
        size += float(first.square().sum())
        dtypes = {one.dtype for mine in own for one in mine}
        rounded += (2 * max(map(numerics.rounding, dtypes))) ** 2 * float(first.square().sum())
        distance += max((float((one - first).square().sum()) for one in rest), default=0.0)
    return distance > max(numerics.ALIKE**2 * size, rounded)


def may_be_fixed(finding: DoctorFinding) -> bool:
    """Whether a finding is a note that later steps may explain: all ranks read fixed data, from no loader."""
    return finding.title == SAME and finding.lines[1:] in ((_NO_LOADER, _UNDER_DROPOUT), (_NO_LOADER, _FROM_THE_SAME))


def check_batches_ever(records: Sequence[Evidence], noted: Sequence[DoctorFinding] = ()) -> Iterator[DoctorFinding]:
    """D9, after the last step: a rank does not read in each step what it has read in the one before.

    Args:
        noted: notes of ranks that read the same, which have waited (see :func:`may_be_fixed`).
    """
    batches = [[frozenset(record.forwards.batches) for record in one.records] for one in records]
    ranks = [rank for rank, mine in enumerate(zip(*batches, strict=True)) if all(mine) and len(set(mine)) == 1]
    # Copies that train by themselves, as in meta-learning, take a few steps on one batch.
    is_fixed = len(records) > 1 and bool(ranks) and not all(one.reduces_nothing for one in records)
    if is_fixed and noted and len(set(batches[0])) == 1 and len(ranks) == len(batches[0]):
        yield _of_fixed(noted[0], f"{records[0].step}-{records[-1].step}", len(ranks))
        return
    yield from noted
    if is_fixed:
        lines = (
            f"{ranks_of(ranks)} read the same microbatches in the steps {records[0].step}-{records[-1].step}",
            "meant, as for a batch to be learned by heart or to serve several steps, or for made-up data of a "
            "benchmark? else each step starts the loader again: keep one iterator for all steps",
        )
        title = "each step reads the same data"
        yield DoctorFinding((codes.DATA,), codes.SHARED_DATA, records[-1].step, title, lines, is_note=True)


def _of_fixed(note: DoctorFinding, steps: str, count: int) -> DoctorFinding:
    """Make one note, of one line, of data that are the same on all ranks and in each step."""
    by, drawn = (" by dropout", "") if _UNDER_DROPOUT in note.lines else ("", _DRAWN)
    line = (
        f"the {count} ranks read the same microbatches in all of the steps {steps}, and compute other gradients{by}: "
        f"meant, as for fixed inputs{drawn}? else give each rank and step its own part of the data"
    )
    return dataclasses.replace(note, title="ranks and steps read the same data", lines=(line,))


def _read_twice(evidence: Evidence) -> Iterator[DoctorFinding]:
    """Find a microbatch that is read again for another backward: several forwards for one backward are meant."""
    again: dict[int, tuple[int, ...]] = {}
    most = 0
    for record in evidence.records:
        read: dict[int, set[int]] = {}
        for one in record.forwards.inputs:
            if one.backwards < record.backwards:  # else nothing was computed from it
                read.setdefault(one.batch, set()).add(one.backwards)
        times, numbers = max(((len(own), tuple(sorted(own))) for own in read.values()), default=(0, ()))
        if times > 1:
            again[record.rank], most = numbers, max(most, times)
    if not again:
        return
    count = max(evidence.records[rank].backwards for rank in again)
    lines = [f"{ranks_of(list(again))} read one of {count} microbatches {most} times in the step"]
    title, is_note = "a microbatch is read twice", not all(_are_alike(evidence, *one) for one in again.items())
    if is_note:
        lines.append("its gradients differ: meant, as where a batch has several losses or dropout? else the sampler "
                     "repeats it")  # fmt: skip
    yield DoctorFinding((codes.DATA,), codes.SHARED_DATA, evidence.step, title, tuple(lines), is_note)


def _are_alike(evidence: Evidence, rank: int, numbers: Sequence[int]) -> bool:
    """Whether a rank has computed the same gradients, up to a factor, in some backward passes, as far as is seen."""
    for name in evidence.names:
        own = evidence.own(name).get(rank)
        if own is None:
            continue
        parts = [own[number] for number in numbers]
        if any(fit(one, parts[0])[1] > 8 * evidence.tolerance(name) for one in parts[1:]):
            return False
    return True


def check_leaks(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D11: what was computed for the step of another model's optimizer is dropped before this model's."""
    if ranks := [rank for rank, own in enumerate(evidence.gradients) if own.leaks]:
        lines = (
            f"on {ranks_of(ranks)} they contain gradients computed for the step of an optimizer that has none of these "
            "parameters",
            "meant? else zero_grad() belongs between the two, as where a generator's loss goes through a discriminator",
        )
        title = "gradients for another model's optimizer are never zeroed"
        yield DoctorFinding((codes.REDUCED_ONCE,), codes.SOME_MICROBATCHES, evidence.step, title, lines, is_note=True)


def are_averaged(before: Evidence, now: Evidence) -> bool:
    """Whether replicas that a step has left different are equal when the next one begins."""
    sets = [(name, members) for name, found in before.holders.items() for members in found if len(members) > 1]

    def differ(evidence: Evidence, name: str, members: Sequence[int], what: str) -> bool:
        values = {getattr(one, what) for rank in members if (one := evidence.records[rank].parameters.get(name))}
        # Of one that some ranks do not step nothing is known when the step begins.
        return len(values - {None}) > 1 or (what == "before" and len(values) > 1)

    apart = [one for one in sets if differ(before, *one, "after")]
    return bool(apart) and not any(differ(now, *one, "before") for one in apart)


def of_averaged(evidence: Evidence) -> DoctorFinding:
    """Make the note of ranks that train apart, and whose parameters become equal between steps."""
    lines = (
        "each rank steps by gradients that are not those of all ranks, and parameters are equal again when a later "
        "step begins",
        "meant, as in local SGD? else reduce gradients in each step",
    )
    return DoctorFinding(
        (codes.REDUCED_ONCE,),
        codes.UNREDUCED,
        evidence.step,
        "parameters are averaged, and gradients are not",
        lines,
        is_note=True,
    )


def of_dropped(evidence: Evidence) -> DoctorFinding:
    """Make the note of gradients that all ranks have dropped in one of the steps and not in others."""
    drops = evidence.gradients[0].drops
    count = drops[-1].backwards if drops else 0
    lines = (
        f"all ranks dropped the gradients of {count} backward{'s' * (count != 1)}, and stepped by those that followed",
        "meant, as where a step is skipped for its norm? else zero_grad() is called between microbatches",
    )
    return DoctorFinding(
        (codes.REDUCED_ONCE,),
        codes.SOME_MICROBATCHES,
        evidence.step,
        DROPPED,
        lines,
        is_note=True,
    )


def of_skip(step: int, without: Sequence[int], count: int) -> DoctorFinding:
    """Make the finding of ranks that go on without a step that the others make."""
    others = [rank for rank in range(count) if rank not in without]
    lines = (
        f"{ranks_of(without)} dropped the gradients without a step of the optimizer, and {ranks_of(others)} stepped by "
        "them: the parameters drift apart, and watching ends",
        "each rank decides by a number of its own: reduce the norm, loss or overflow that decides over all ranks first",
    )
    return DoctorFinding((codes.EQUAL_PARAMETERS,), codes.APART, step, "some ranks skip a step", lines)


def with_samplers(finding: DoctorFinding, seen: Sequence[Sequence[str]]) -> DoctorFinding:
    """Return the finding that ranks read the same data with the samplers that ranks have, which give it to them."""
    is_note = finding.is_note
    if not any(seen):
        is_note |= _UNDER_DROPOUT in finding.lines  # no sampler shows that the data are meant to differ
        told = _NO_LOADER
    elif streams := [one for one in seen[0] if one.startswith(ITERABLE)]:
        told = (
            f"seen: {', '.join(streams[:3])} on each rank, without a sampler: divide the data by rank in __iter__(), "
            "and the part of a rank by worker (get_worker_info())"
        )
    elif len({*map(tuple, seen)}) > 1:
        told = f"seen: {', '.join(seen[0][:3])} on rank 0, and others on other ranks: the data have the same rows twice"
    elif any(one.startswith("DistributedSampler") for one in seen[0]):
        told = f"seen: {', '.join(seen[0][:3])} on each rank: give it num_replicas and rank of the process group"
    else:
        told = f"seen: {', '.join(seen[0][:3])} on each rank, which knows no rank: use DistributedSampler"
    return dataclasses.replace(finding, lines=(finding.lines[0], told, *finding.lines[2:]), is_note=is_note)


def _divide_inputs(evidence: Evidence, ranks: Sequence[int]) -> bool:
    """Whether ranks read parts of one input: their modules compute with DTensors that ranks divide, or all have."""
    marks = [tuple(map(str, evidence.records[rank].forwards.divided)) for rank in ranks]
    return all(marks) and len(set(marks)) == 1


def check_collectives(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D13: the members of each group issue the same collectives, as far as Python issues them."""
    # Where a collective is issued may differ: a rank that is ahead gathers in another phase.
    traces = [
        Trace(
            dataclasses.replace(one, phase="", kind=f"{one.kind} {one.operator}".strip()) for one in record.collectives
        )
        for record in evidence.records
    ]
    if (found := first_difference(traces)) is not None:
        lines = tuple(line.strip() for line in found.text.splitlines())
        yield DoctorFinding((codes.COLLECTIVES,), "", evidence.step, "ranks issue different collectives", lines)


def check_ties(evidence: Evidence, ties: Sequence[Sequence[str]]) -> Iterator[DoctorFinding]:
    """D8: parameters that were one are one still; a note where user code may mean to part them."""
    apart = [names for names in (_no_longer_tied(evidence, one) for one in ties) if names]
    for names in apart:
        lines = (
            _were_one(names),
            "each gets a part of the gradient: tie them again after to_empty(), loading or wrapping",
        )
        yield DoctorFinding((codes.TIES,), codes.UNTIED, evidence.step, "tied parameters are no longer tied", lines)
    start = evidence.starts[0]
    for names in (_no_longer_tied(evidence, one) for one in (*start.ties, *start.built.untied)):
        if names and not any(set(names) >= set(one) for one in apart):
            lines = (
                _were_one(names),
                "meant, as where user code unties them? else each gets a part of the gradient: tie them again",
            )
            title = "parameters were tied and are not"
            yield DoctorFinding((codes.TIES,), codes.UNTIED, evidence.step, title, lines, is_note=True)


def _no_longer_tied(evidence: Evidence, names: Sequence[str]) -> list[str]:
    """Return those of some names that the model has, if they are not those of one parameter; else none."""
    kept = [set(one) for one in evidence.records[0].modules.ties]
    known = {name for record in evidence.records for name in record.parameters} | {n for s in kept for n in s}
    mine = [name for name in names if name in known]
    return mine if len(mine) > 1 and not any(set(mine) <= one for one in kept) else []


def _were_one(names: Sequence[str]) -> str:
    return f"{' and '.join(map(repr, names))} were one parameter and are {len(names)}"


def check_finite(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D16: the first NaN or infinity, by rank and module."""
    found = [(record.not_finite[0].what, record.rank) for record in evidence.records if record.not_finite]
    if found:
        what, rank = found[0]
        ranks = [one for _, one in found]
        lines = [f"first: {what} on rank {rank}"]
        lines += [f"{what} on rank {rank}" for what, rank in found[1:3]]
        # An output that has no part in any gradient is a mask, or of a batch that the loop leaves out.
        gradients = [one for own in evidence.gradients for one in own.every()]
        is_note = all(one.fingerprint.is_finite for one in gradients)
        if is_note:
            lines.append("all gradients are finite: meant, as in a mask, or where such a batch is left out?")
        on = f"seen on {ranks_of(ranks)} of {len(evidence.records)}"
        yield DoctorFinding((codes.FINITE,), "", evidence.step, NOT_FINITE, (*lines, on), is_note)


#: How parameters that stay gathered are resharded.
_RESHARD = (
    "reshard before the optimizer's step or the next forward: set_reshard_after_backward(True) for the last backward "
    "of a step, or reshard() of each unit after it"
)


def check_gathered(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D14: forwards compute with the values that the shards have."""
    if names := _names(record.modules.outdated for record in evidence.records):
        lines = (
            f"{listed(names)}: {len(names)} of {len(evidence.names)} parameters stay unsharded over the optimizer's "
            "step, and the forward after it computes with their values from before: the loss is not of the new values",
            _RESHARD,
        )
        yield DoctorFinding((codes.RESHARDED,), "", evidence.step, "forwards compute with outdated parameters", lines)


def _names(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(itertools.chain.from_iterable(lists)))


def check_gathered_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D14, after the last step: no unit stays unsharded after the optimizer's step; outdated values are worse."""
    left = [(one, _names(record.modules.gathered for record in one.records)) for one in records]
    evidence, names = next(((one, names) for one, names in left if names), (None, []))
    if evidence is None or any(record.modules.outdated for one in records for record in one.records):
        return
    are = "1 parameter is" if len(names) == 1 else f"{len(names)} parameters are"
    lines = (
        f"{listed(names)}: {are} still unsharded after the optimizer's step, where the shards save no memory, and no "
        "forward was seen to compute with outdated values",
        f"meant, as where the next forward unshards again? else {_RESHARD}",
    )
    yield DoctorFinding((codes.RESHARDED,), "", evidence.step, "units stay unsharded", lines, is_note=True)


def check_memory(memory: Mapping[int, Sequence[int | None]]) -> Iterator[DoctorFinding]:
    """D15: allocated bytes at the same point of two steps that are not the first."""
    if len(memory) < 3:
        return
    last, before = sorted(memory)[-1], sorted(memory)[-2]
    grown = [
        (now - then, rank, then)
        for rank, (now, then) in enumerate(zip(memory[last], memory[before], strict=True))
        if now is not None and then is not None
    ]
    if grown and max(grown)[0] > max(8 << 20, max(grown)[2] // 100):
        most, rank, then = max(grown)
        more, of = f"{most / 2**20:.1f} MiB", f"{then / 2**20:.1f} MiB"
        line = f"rank {rank} holds {more} more after step {last} than after step {before} ({of})"
        yield DoctorFinding((codes.MEMORY,), "", last, "memory grows", (line,), is_note=True)


def check_contributions(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D5: each rank contributes to some gradient."""
    own = [[one for parts in mine.own.values() for _, one in parts] for mine in evidence.gradients]
    if not any(gradient.fingerprint.squares for mine in own for gradient in mine):
        return
    silent = [rank for rank, mine in enumerate(own) if mine and not any(one.fingerprint.squares for one in mine)]
    if silent:
        line = f"each gradient that {ranks_of(silent)} compute{'s' * (len(silent) == 1)} is zero, and others' are not"
        lines = [line, *_why_silent([evidence.records[rank].losses.tokens for rank in silent])]
        title = "a rank contributes nothing"
        yield DoctorFinding(
            (codes.HAS_GRADIENT,), codes.MISSING, evidence.step, title, tuple(lines), is_open=len(lines) == 1
        )


def _why_silent(tokens: Sequence[Sequence[tuple[int, float]]]) -> list[str]:
    """Say why the gradients of ranks are zero, if it is seen at their cross-entropies."""
    if not all(tokens):
        return []
    if not any(count for mine in tokens for count, _ in mine):
        return ["seen: no label of their cross_entropy counts: each is ignore_index"]
    if not any(weight for mine in tokens for _, weight in mine):
        return ["seen: their cross_entropy has labels that count, and the loss multiplies it by zero"]
    return []


def check_gradients_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D5, after the last step: each parameter that trains had a gradient in one of the steps."""
    never = [name for name in records[0].names if _trains(records, name) and not _had_gradient(records, name)]
    steps = f"the {len(records)} steps" if len(records) > 1 else "the step"
    idle = [name for name in never if all(name in one.modules.idle for seen in records for one in seen.records)]
    if idle:
        lines = (
            f"{listed(idle)}: no forward on any rank calls the module in {steps}",
            "meant, as where layers or experts are drawn at random, or a part is unused? else the forward leaves it "
            "out; more steps tell (--steps)",
        )
        yield DoctorFinding(
            (codes.HAS_GRADIENT,), codes.MISSING, records[-1].step, "modules have no turn", lines, is_note=True
        )
    never = [name for name in never if name not in idle]
    if never and len(never) < len(records[0].names):
        line = f"{listed(never)} get{'s' * (len(never) == 1)} no gradient on any rank in {steps}"
        told = (line, *_why_never(records, never))
        yield DoctorFinding((codes.HAS_GRADIENT,), codes.MISSING, records[-1].step, "parameters get no gradient", told)


def _trains(records: Sequence[Evidence], name: str) -> bool:
    """Whether a parameter trains on the first rank in some step."""
    held = (one.records[0].parameters.get(name) for one in records)
    return any(one is not None and one.trains for one in held)


def _had_gradient(records: Sequence[Evidence], name: str) -> bool:
    """Whether a rank had a gradient of a parameter in some step."""
    return any(
        own.own.get(name) or name in own.unplaced or has_gradient(own.at_step.get(name))
        for one in records
        for own in one.gradients
    )


def _why_never(seen: Sequence[Evidence], names: Sequence[str]) -> Iterator[str]:
    """Say how modules were called whose parameters get no gradient."""
    every = [record for one in seen for record in one.records]
    if any(record.modules.compiled or record.modules.unhooked for record in every):
        return
    detached = [name for name in names if all(name in (*one.modules.detached, *one.modules.idle) for one in every)]
    if detached:
        yield (f"seen: the forward of {_those(detached, names)} runs with gradients disabled: under no_grad(), or in a "
               "reentrant checkpoint of inputs that require none")  # fmt: skip
    if rest := [name for name in names if name not in detached]:
        kinds = _without_gradient(every, is_flat=bool(seen[0].starts[0].flat))
        through = f" ({', '.join(sorted(kinds))} was seen)" if kinds else ""
        yield (f"seen: the forward of {_those(rest, names)} runs with gradients enabled: its output is detached "
               f"or unused afterwards, or goes through a collective without a gradient{through}")  # fmt: skip


def _without_gradient(records: Sequence[StepRecord], *, is_flat: bool) -> set[str]:
    """Return the kinds of collectives of forwards that may have no gradient."""
    kinds = {one.kind for record in records for one in record.collectives if one.phase == "forward"}
    if is_flat or any(one.mesh for record in records for one in record.parameters.values()):
        kinds -= {"all_gather"}  # of parameters, which has a gradient
    return kinds


def _those(some: list[str], every: Sequence[str]) -> str:
    return "their modules" if len(some) == len(every) else f"the modules of {listed(some)}"


def has_gradient(gradient: object) -> bool:
    """Whether a gradient is finite and not all zeros."""
    fingerprint = getattr(gradient, "fingerprint", None)
    return fingerprint is not None and fingerprint.squares != 0 and fingerprint.is_finite


def _where(evidence: Evidence, members: Sequence[int]) -> str:
    for name, ranks in evidence.groups_of(members[0]).items():
        if set(members) == set(ranks):
            return f" ({name})"
    return ""
