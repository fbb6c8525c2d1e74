"""What all ranks have seen of one step: who holds what, who reads what, what is in a gradient."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from shardproof.harness.judging import numerics
from shardproof.harness.judging.signatures import fit
from shardproof.harness.tensors.fingerprints import Box, K
from shardproof.harness.tensors.layouts import Layout
from shardproof.harness.watching.assembly import Held, full_sketch
from shardproof.harness.watching.records import Bits, Gradient, GradientRecord, Groups, Reducers, StepRecord
from shardproof.harness.watching.roots import RootName
from shardproof.harness.watching.ties import Built


@dataclasses.dataclass(frozen=True)
class Start:
    """What one rank is when watching begins.

    Attributes:
        groups: the groups of ranks that it is in.
        bits: its parameters by canonical name: the box that it holds, and the bits.
        replicated: the ranks that a wrapper such as DDP keeps equal; empty without one.
        model: the name of the model's class.
        shapes: of its parameters by canonical name, as torch reports them.
        flat: of parameters in flat ones, the elements that the rank holds and the ranks that share them.
        reducers: what reduces its gradients in backward.
        constant: the names of parameters of which it holds one value alone, such as zeros.
        seed: that of torch's random numbers.
        buffers: the bits of buffers of user code's modules, by canonical name.
        ties: the sets of names of one parameter.
        built: what has happened to parameters since the model was built, as far as it was seen.
        name: how user code names the model.
        varied: the DTensors of whose local shard not all rows are equal, each with the device type of its mesh.
        has_more: whether optimizers have parameters of other models.
    """

    groups: Groups
    bits: dict[str, tuple[Box | None, tuple[int, ...], Bits]]
    replicated: tuple[int, ...]
    model: str
    shapes: dict[str, tuple[int, ...]]
    flat: dict[str, tuple[int, tuple[int, ...]]]
    reducers: Reducers = dataclasses.field(default_factory=Reducers)
    constant: frozenset[str] = frozenset()
    seed: int = 0
    buffers: dict[str, Bits] = dataclasses.field(default_factory=dict)
    ties: tuple[tuple[str, ...], ...] = ()
    built: Built = dataclasses.field(default_factory=Built)
    name: RootName = dataclasses.field(default_factory=RootName)
    varied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_more: bool = False


@dataclasses.dataclass
class Evidence:
    """The records of all ranks of one step, in the order of ranks.

    Attributes:
        starts: what each rank was when watching began.
        holders: by parameter, the sets of ranks that hold the same elements; see :func:`holders_of`.
        are_others_reduced: whether something reduces the gradients of another root of the loop.
    """

    records: Sequence[StepRecord]
    starts: Sequence[Start]
    holders: Mapping[str, Sequence[tuple[int, ...]]]
    are_others_reduced: bool = False
    _known: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.records[0].step

    @functools.cached_property
    def gradients(self) -> list[GradientRecord]:
        """What each rank has seen of gradients."""
        return [record.gradients for record in self.records]

    @functools.cached_property
    def names(self) -> list[str]:
        """All parameters, in the order of the model."""
        return list(dict.fromkeys(name for record in self.records for name in record.parameters))

    @functools.cached_property
    def trained(self) -> list[str]:
        """Those that require a gradient on some rank."""
        held = [record.parameters for record in self.records]
        return [name for name in self.names if any(name in one and one[name].trains for one in held)]

    @functools.cached_property
    def left(self) -> list[str]:
        """The parameters that are in no optimizer that steps; none where no parameter is in one."""
        held = {name for record in self.records for name, one in record.parameters.items() if one.optimizer is not None}
        return [name for name in self.names if name not in held] if held else []

    @functools.cached_property
    def data_names(self) -> tuple[str, ...]:
        """The groups that are known to be of data."""
        return tuple(dict.fromkeys(name for start in self.starts for name in start.groups.data))

    @functools.cached_property
    def readers(self) -> list[tuple[int, ...]]:
        """The sets of ranks that are one data rank: by the groups where these are known, else by what they read."""
        everyone = range(len(self.records))
        groups = [start.groups for start in self.starts]
        others = [members for one in groups for name, members in one.named.items() if name not in one.data]
        if others:
            return _joined(everyone, others)
        in_data = [one.named[name] for one in groups for name in one.data]
        if in_data and len(_joined(everyone, in_data)) == 1:
            return [(rank,) for rank in everyone]
        return self._readers_by_batches

    @property
    def _readers_by_batches(self) -> list[tuple[int, ...]]:
        """The sets of ranks that read the same; each by itself where all do."""
        seen: dict[tuple[int, ...], list[int]] = {}
        for record in self.records:
            seen.setdefault(record.forwards.batches, []).append(record.rank)
        if len(seen) == 1:
            return [(record.rank,) for record in self.records]
        return sorted(tuple(ranks) for ranks in seen.values())

    @functools.cached_property
    def are_readers_known(self) -> bool:
        """Whether groups tell which ranks read the same data."""
        return any(start.groups.named for start in self.starts)

    @functools.cached_property
    def drops(self) -> int:
        """How often ranks dropped gradients in the step; see :class:`records.Drop`."""
        return max(len(one.drops) for one in self.gradients)

    @functools.cached_property
    def are_drops_meant(self) -> bool:
        """Whether what was dropped was no microbatch on any rank."""
        return all(one.is_meant for mine in self.gradients for one in mine.drops)

    @functools.cached_property
    def after_drops(self) -> "Evidence":
        """The same without the backward passes whose gradients were dropped."""
        kept = [one.since(drops[-1].backwards) if (drops := one.gradients.drops) else one for one in self.records]
        return Evidence(kept, self.starts, self.holders, self.are_others_reduced)

    @functools.cached_property
    def hooks(self) -> tuple[str, ...]:
        """The communication hooks of wrappers; see :class:`records.Reducers`."""
        return tuple(dict.fromkeys(name for start in self.starts for name in start.reducers.hooks))

    @functools.cached_property
    def reduces_nothing(self) -> bool:
        """Whether no wrapper and no mesh reduces gradients, and ranks are not seen to sum anything themselves."""
        phases = ("backward", "between", "step")
        is_named = self.are_others_reduced or any(start.groups.named or start.replicated for start in self.starts)
        return not is_named and not any(_reduced_bytes(record, phases) for record in self.records)

    @functools.cached_property
    def parts(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """Parameters of which ranks hold other values when training begins, and nothing declares that they are one's.

        Each has by rank the ranks that hold the same: they may be parts of one model, which user code divides itself.
        """
        found = {}
        for name, sets in self.holders.items():
            if len(sets) > 1 and not _is_declared(self.starts, name):
                found[name] = {rank: members for members in sets for rank in members}
        return found

    @functools.cached_property
    def ignored(self) -> frozenset[str]:
        """The parameters that DDP ignores because user code says so: each rank may have its own, such as an expert."""
        return frozenset(name for start in self.starts for name in start.reducers.ignored)

    @functools.cached_property
    def ends_equal(self) -> bool:
        """Whether the step moves all parameters that several ranks hold, and they are equal after it."""
        sets = [(name, members) for name, found in self.holders.items() for members in found if len(members) > 1]
        return bool(sets) and all(self.are_gathered(*one) for one in sets)

    def are_gathered(self, name: str, members: Sequence[int]) -> bool:
        """Whether the step has moved a parameter, and what ranks hold of it is equal after it."""
        held = [one for rank in members if (one := self.records[rank].parameters.get(name)) is not None]
        ends = {one.after for one in held}
        return len(ends) == 1 and None not in ends and any(None is not one.before != one.after for one in held)

    @functools.cached_property
    def reduces_in_step(self) -> bool:
        """Whether ranks reduce as much as gradients are inside of the optimizer's step, and so perhaps these."""
        numel = sum(math.prod(self.starts[0].shapes.get(name, ())) for name in self.names)
        return all(sum(_reduced_bytes(record, ("step",)).values()) >= numel for record in self.records)

    @functools.cached_property
    def reduced_eps(self) -> float:
        """The spacing at 1 of the narrowest dtype in which ranks reduce as much as gradients are; 0 if none is seen."""
        numel = sum(math.prod(self.starts[0].shapes.get(name, ())) for name in self.names)
        reduced = _reduced_bytes(self.records[0], ("backward", "between"))
        return max((numerics.EPS.get(dtype, 0.0) for dtype, nbytes in reduced.items() if nbytes >= numel), default=0.0)

    def sharers(self, name: str) -> list[tuple[int, ...]]:
        """Return the sets of ranks that hold different parts of a parameter which a mesh or a wrapper has divided.

        A rank that holds no element of it is in none: what its optimizer has of it may be of any age.
        """
        held = [record.rank for record in self.records if name in record.parameters]
        sets = [
            (*self.records[rank].parameters[name].mesh, *self.starts[rank].flat.get(name, (0, ()))[1]) for rank in held
        ]
        found = []
        for ranks in _joined(held, sets):
            parts = {rank: part for rank in ranks if (part := self._part(name, rank)) is not None}
            if len(set(parts.values())) > 1:
                found.append(tuple(parts))
        return found

    def _part(self, name: str, rank: int) -> Box | int | None:
        """Return what tells a rank's part of a parameter from others; None if it is not known or has no element."""
        if (flat := self.starts[rank].flat.get(name)) is not None:
            return rank if flat[0] else None  # each rank of the group has one of its own
        box = self.records[rank].parameters[name].box
        return box if box is not None and box.numel else None

    def reader_of(self, rank: int) -> int:
        """Return the number of the data rank that a rank belongs to."""
        return next(number for number, ranks in enumerate(self.readers) if rank in ranks)

    def groups_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the groups that a rank is in, by name."""
        return self.starts[rank].groups.named

    def own(self, name: str) -> dict[int, list[torch.Tensor]]:
        """Return a parameter's own gradients, by rank and then by microbatch, as vectors.

        Of ranks that read the same data and have the same gradient of the same elements, one is taken: what they have
        is one contribution.
        """
        if ("own", name) not in self._known:
            self._known["own", name] = self._own(name)
        return cast(dict[int, list[torch.Tensor]], self._known["own", name])

    def _own(self, name: str) -> dict[int, list[torch.Tensor]]:
        found: dict[int, list[torch.Tensor]] = {}
        taken: dict[tuple[int, Box], list[Gradient]] = {}
        most = max((record.backwards for record in self.records), default=0)
        for record in self.records:
            parts = record.gradients.own.get(name, [])
            if not parts:
                continue
            key = (self.reader_of(record.rank), parts[0][1].box)
            mine = [gradient for _, gradient in parts]
            if key in taken and not parts[0][1].pending and _are_same(taken[key], mine):
                continue
            taken.setdefault(key, mine)
            vectors = [torch.zeros(K, dtype=torch.float64)] * max(most, 1)  # one object, which is replaced
            for number, gradient in parts:
                at = min(number, len(vectors) - 1)
                vectors[at] = vectors[at] + vector_of(gradient)
            found[record.rank] = vectors
        return found

    def hooked(self, name: str) -> float:
        """Return by what hooks of user code on a parameter multiply its gradient on all ranks; 1 if by no factor."""
        factors = []
        for mine in self.gradients:
            given, own = mine.given.get(name, []), mine.own.get(name, [])
            if len(given) != len(own):
                return 1.0
            for (_, before), (_, after) in zip(given, own, strict=True):
                factor, rest = fit(vector_of(after), vector_of(before))
                if not rest <= self.tolerance(name):
                    return 1.0
                factors += [factor] if factor else []
        is_one = factors and max(factors) - min(factors) <= numerics.ONE_FACTOR * abs(factors[0])
        return factors[0] if is_one else 1.0

    def data_peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with which a rank shares groups of data-parallel ranks, itself among them."""
        members = (self.starts[one].groups for one in range(len(self.records)))
        sets = _joined(range(len(self.records)), (own.named[name] for own in members for name in own.data))
        return next(one for one in sets if rank in one)

    def computed(self, name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a gradient at the optimizer's step and the sum of what the rank and its data-parallel peers computed.

        As vectors; None where one of them is not known.
        """
        peers = self.data_peers(rank)
        parts = [vector_of(one) for peer in peers for _, one in self.gradients[peer].own.get(name, [])]
        seen = self._assembled(name, rank, "at_step", peers) if name in self.gradients[rank].at_step else None
        return None if seen is None or not parts else (seen, torch.stack(parts).sum(0))

    def assembled(self, name: str, rank: int, stage: str) -> torch.Tensor | None:
        """Return the vector of a reduced gradient as a rank has it, from the parts that its peers hold; None without.

        It is one object for ranks that have the same.

        Args:
            stage: "after_backward" or "at_step".
        """
        mine = getattr(self.gradients[rank], stage).get(name)
        if mine is None:
            return None
        if mine.box.is_full and not mine.pending:
            sketch = mine.fingerprint.sketch
            if sketch not in self._known:
                self._known[sketch] = vector_of(mine)
            return cast(torch.Tensor, self._known[sketch])
        peers = tuple(self._peers(name, rank))
        if not self._is_shared(name, stage, peers):
            return self._assembled(name, rank, stage, peers)
        if ("whole", name, stage, peers) not in self._known:
            self._known["whole", name, stage, peers] = self._assembled(name, rank, stage, peers)
        return cast("torch.Tensor | None", self._known["whole", name, stage, peers])

    def _is_shared(self, name: str, stage: str, peers: tuple[int, ...]) -> bool:
        """Whether peers that have a gradient assemble the same: parts of the same elements are equal, and no sums."""
        key = ("shared", name, stage, peers)
        if key not in self._known:
            gradients = [one for peer in peers if (one := getattr(self.gradients[peer], stage).get(name)) is not None]
            marks = {one.box: one.fingerprint for one in gradients}
            self._known[key] = not any(one.pending or marks[one.box] != one.fingerprint for one in gradients)
        return bool(self._known[key])

    def _assembled(self, name: str, rank: int, stage: str, peers: Sequence[int]) -> torch.Tensor | None:
        order = [rank, *(one for one in peers if one != rank)]
        held = ((peer, getattr(self.gradients[peer], stage).get(name)) for peer in order)
        return full_sketch(
            Held(peer, Layout(one.box, one.pending), vector_of(one)) for peer, one in held if one is not None
        )

    def squares(self, rank: int, stage: str, *, local: bool) -> float:
        """Return the sum of the squares of all gradients: of what a rank holds, or of each element once."""
        if local:
            return float(sum(one.fingerprint.squares for one in getattr(self.gradients[rank], stage).values()))
        found = 0.0
        for name in self.names:
            peers = tuple(self._peers(name, rank))
            if rank not in peers or not self._is_shared(name, stage, peers):
                found += self._squares(name, stage, [rank, *peers])
                continue
            if ("squares", name, stage, peers) not in self._known:
                self._known["squares", name, stage, peers] = self._squares(name, stage, peers)
            found += self._known["squares", name, stage, peers]
        return found

    def _squares(self, name: str, stage: str, peers: Sequence[int]) -> float:
        parts: dict[Box, float] = {}
        for peer in peers:
            gradient = getattr(self.gradients[peer], stage).get(name)
            if gradient is not None:
                parts.setdefault(gradient.box, gradient.fingerprint.squares)
            if gradient is not None and gradient.box.is_full:
                break
        return sum(parts.values())

    def _peers(self, name: str, rank: int) -> Sequence[int]:
        parameter = self.records[rank].parameters.get(name)
        return parameter.mesh if parameter is not None and parameter.mesh else range(len(self.records))

    def numel(self, name: str) -> int | None:
        """Return how many elements a full parameter has; None where its shape is not known."""
        shape = self.starts[0].shapes.get(name)
        return None if shape is None else math.prod(shape)

    def rounding(self, name: str) -> float:
        """Return by which part of it one rounding moves a parameter's gradient at most, in its narrowest dtype."""
        seen = (one for own in self.gradients for one in (own.at_step.get(name), own.after_backward.get(name)) if one)
        return max((numerics.rounding(one.dtype) for one in seen), default=0.0)

    def tolerance(self, name: str) -> float:
        """Return the relative distance of sums of a parameter's gradients that rounding explains.

        An ulp of the narrowest dtype that the gradients have had, for each of the sums, of the largest part: where
        parts nearly cancel, what is left of them is small, and their rounding is not.
        """
        own = [gradient for mine in self.gradients for _, gradient in mine.own.get(name, [])]
        seen = [one.at_step.get(name) or one.after_backward.get(name) for one in self.gradients]
        dtypes = {gradient.dtype for gradient in [*own, *(one for one in seen if one is not None)]}
        eps = max((numerics.EPS.get(dtype, 2.0**-7) for dtype in dtypes), default=2.0**-23)
        eps = max(eps, self.reduced_eps)
        parts = math.sqrt(sum(gradient.fingerprint.squares for gradient in own))
        whole = (
            float(torch.stack([one for parts in self.own(name).values() for one in parts]).sum(0).norm()) if own else 0
        )
        # A sketch of K numbers of a vector is about sqrt(K) times as long.
        whole /= math.sqrt(8)
        cancelled = max(1.0, parts / whole) if whole > 0 and math.isfinite(parts) else 1.0
        return numerics.SUM_EPS * eps * math.sqrt(max(len(self.records), 1)) * cancelled


def _reduced_bytes(record: StepRecord, phases: Sequence[str]) -> dict[str, int]:
    """Return how many bytes of each dtype a rank sums over ranks in some phases of a step."""
    found: dict[str, int] = {}
    for one in record.collectives:
        if one.phase in phases and one.kind in ("all_reduce", "reduce_scatter", "reduce", "all_to_all"):
            found[one.dtype] = found.get(one.dtype, 0) + one.nbytes
    return found


def holders_of(starts: Sequence[Start]) -> tuple[dict[str, list[tuple[int, ...]]], dict[str, list[tuple[int, ...]]]]:
    """Return which ranks hold the same elements of each parameter when watching begins, and which of these differ.

    Ranks that a mesh or a wrapper declares to be replicas are, whatever they hold; others are if their bits are equal.
    Each rank has its own of a parameter that DDP ignores because user code says so.
    The second dictionary has the declared sets of replicas that are not equal.
    """
    held: dict[str, list[tuple[int, ...]]] = {}
    differ: dict[str, list[tuple[int, ...]]] = {}
    places = [flat_places([one.flat for one in starts], rank) for rank in range(len(starts))]
    for name in dict.fromkeys(name for start in starts for name in start.bits):
        for ranks in _by_box(starts, places, name):
            sets = _declared_sets(starts, name, ranks)
            unequal = [members for members in sets if len({starts[rank].bits[name][2] for rank in members}) > 1]
            if unequal:
                differ.setdefault(name, []).extend(unequal)
            by_bits: dict[Bits, list[int]] = {}
            for members in sets:
                by_bits.setdefault(starts[members[0]].bits[name][2], []).extend(members)
            held.setdefault(name, []).extend(tuple(sorted(members)) for members in by_bits.values())
    _part_ignored(starts, held, differ)
    _part_constants(starts, held)
    return held, differ


def _by_box(starts: Sequence[Start], places: Sequence[Mapping[str, tuple[int, int]]], name: str) -> Iterator[list[int]]:
    """Yield the ranks that hold one part of a parameter, for each part whose place is known."""
    found: dict[Box, list[int]] = {}
    for rank, start in enumerate(starts):
        if name not in places[rank] and name not in start.bits:
            continue
        box = start.bits[name][0] if name not in places[rank] else None
        if name in places[rank]:
            begin, full = places[rank][name]
            box = Box((full,), flat=(begin, begin + start.flat[name][0]))
        if box is not None:
            found.setdefault(box, []).append(rank)
    yield from found.values()


def _declared_sets(starts: Sequence[Start], name: str, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the sets of ranks that a mesh or a wrapper declares to be replicas of a part; others are by themselves."""
    declared = [
        (*starts[rank].bits[name][1], *starts[rank].replicated, *_tensor_parallel(starts[rank])) for rank in ranks
    ]
    inside = [tuple(one for one in members if one in ranks) for members in declared if members]
    return _joined(ranks, [one for one in inside if len(one) > 1])


def _part_ignored(
    starts: Sequence[Start], held: dict[str, list[tuple[int, ...]]], differ: dict[str, list[tuple[int, ...]]]
) -> None:
    """Tell all ranks apart of a parameter that DDP ignores."""
    for name in {name for start in starts for name in start.reducers.ignored}:
        differ.pop(name, None)
        held[name] = [(rank,) for members in held[name] for rank in members]


def _part_constants(starts: Sequence[Start], held: dict[str, list[tuple[int, ...]]]) -> None:
    """Tell apart ranks with the same zeros or ones of a parameter where they have parts of one model."""
    free = [name for name in held if not _is_declared(starts, name)]
    apart = [{rank: own for own in held[name] for rank in own} for name in free if len(held[name]) > 1]
    constants = (name for name in free if all(name in start.constant for start in starts if name in start.bits))
    for name in constants if apart else ():
        held[name] = _by_other_parameters(held[name], apart)


def _by_other_parameters(
    sets: Sequence[tuple[int, ...]], apart: Sequence[Mapping[int, tuple[int, ...]]]
) -> list[tuple[int, ...]]:
    alike: dict[Any, list[int]] = {}
    for members in sets:
        for rank in members:
            alike.setdefault((members, *(by_rank.get(rank) for by_rank in apart)), []).append(rank)
    return [tuple(ranks) for ranks in alike.values()]


def _is_declared(starts: Sequence[Start], name: str) -> bool:
    """Whether a wrapper or a mesh tells which ranks hold the same elements of a parameter."""
    if any(name in one.reducers.ignored for one in starts):
        return False
    return any(name in one.flat or one.replicated or one.bits[name][1] for one in starts if name in one.bits)


def _tensor_parallel(start: Start) -> tuple[int, ...]:
    """The ranks among which DTensors divide a tensor-parallel model: what is no DTensor, each of them holds."""
    if "DTensors" not in start.groups.source:
        return ()
    others = (members for name, members in start.groups.named.items() if name not in start.groups.data)
    return tuple(rank for members in others for rank in members)


def flat_places(flat: Sequence[Mapping[str, tuple[int, tuple[int, ...]]]], rank: int) -> dict[str, tuple[int, int]]:
    """Return where a rank's part of each parameter in a flat one begins, and how many elements its group holds.

    ``flat`` has the same as :attr:`Start.flat` of each rank.
    """
    found = {}
    for name, (_, members) in flat[rank].items():
        sizes = [(one, flat[one][name][0]) for one in members if name in flat[one]]
        begin = sum(size for one, size in sizes if members.index(one) < members.index(rank))
        found[name] = (begin, sum(size for _, size in sizes))
    return found


def vector_of(gradient: Gradient) -> torch.Tensor:
    """Return the sketch of a gradient as a float64 vector."""
    return gradient.fingerprint.vector


def _are_same(one: Sequence[Gradient], other: Sequence[Gradient]) -> bool:
    """Whether two ranks have computed the same gradients, up to rounding."""
    if len(one) != len(other):
        return False
    for mine, theirs in zip(one, other, strict=True):
        a, b = vector_of(mine), vector_of(theirs)
        allowed = numerics.SAME_GRADIENT_EPS * numerics.EPS.get(mine.dtype, 2.0**-7)
        if float((a - b).norm()) > allowed * max(float(a.norm()), float(b.norm())):
            return False
    return True


def _joined(ranks: Iterable[int], sets: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the partition of ranks in which the members of each set are together."""
    part = {rank: rank for rank in ranks}

    def root(rank: int) -> int:
        while part[rank] != rank:
            rank = part[rank]
        return rank

    # Each once: all ranks of a mesh name the same set, and of many ranks that would be a product of both.
    for members in dict.fromkeys(map(tuple, sets)):
        inside = [rank for rank in members if rank in part]
        for rank in inside[1:]:
            a, b = sorted((root(inside[0]), root(rank)))
            part[b] = a
    found: dict[int, list[int]] = {}
    for rank in part:
        found.setdefault(root(rank), []).append(rank)
    return sorted(tuple(members) for members in found.values())
