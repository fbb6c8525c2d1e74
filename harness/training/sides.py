"""What is given of a step that is judged: what the ranks of the run, the baseline and the oracle have seen of it."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from shardproof.harness.judging import numerics
from shardproof.harness.judging.finding import Stage
from shardproof.harness.judging.signatures import fit, name_of_factor, total
from shardproof.harness.tensors.fingerprints import Box, K, digest
from shardproof.harness.training.request import Request, products
from shardproof.harness.watching.assembly import Held, distinct, full_tensor
from shardproof.harness.watching.observation import ByKey, Key, Observed


@dataclasses.dataclass(frozen=True)
class OfRank:
    """What one rank of the run has seen of a step.

    Attributes:
        state: after the step.
        forwards: how many there were.
        norm_types: of the calls that computed a norm.
        data_rank: which data it reads.
        is_fully_sharded: whether its model has units of ``fully_shard``.
    """

    rank: int
    events: ByKey
    state: ByKey
    forwards: int
    norm_types: Sequence[float]
    data_rank: int
    is_fully_sharded: bool


@dataclasses.dataclass(frozen=True)
class OfReference:
    """What the baseline or the oracle has seen of the step: full tensors."""

    tensors: Mapping[Key, torch.Tensor]
    forwards: int


@dataclasses.dataclass(frozen=True)
class Sides:
    """One step of the run, the baseline and the oracle.

    Attributes:
        ranks: what each rank of the run has seen, in the order of ranks.
        counts: the number of microbatches of each data rank.
        narrow: the narrowest dtype in which the baseline computes.
        tokens: by data rank and microbatch, the number of labels that count; 0 where there are none.
        earlier: what :meth:`sums` returned for the steps before, the last one first.
    """

    request: Request
    step: int
    ranks: Sequence[OfRank]
    baseline: OfReference
    oracle: OfReference
    counts: Sequence[int]
    narrow: torch.dtype
    tokens: Sequence[Sequence[int]]
    earlier: Sequence[Mapping[str, torch.Tensor]] = ()

    # What the numbers of the step allow ---------------------------------------------------------

    @functools.cached_property
    def eps(self) -> float:
        """The spacing at 1 of the narrowest dtype."""
        return float(torch.finfo(self.narrow).eps)

    @functools.cached_property
    def looser(self) -> float:
        """By what more is allowed of a scalar where ranks compute parts of one forward.

        They round otherwise than one rank does, and a scalar shows all of it.
        """
        is_divided = any(size > 1 for name, size in self.request.mesh if name not in self.request.data_dims)
        return numerics.LOOSER_IN_PARTS if is_divided else 1.0

    @functools.cached_property
    def near(self) -> float:
        """Within which a factor is a name's."""
        return min(numerics.SAID_EPS * self.eps, numerics.MOST_OF_A_FACTOR)

    @functools.cached_property
    def like(self) -> float:
        """Within which a gradient is what it is said to be."""
        return min(numerics.SAID_EPS * self.eps, numerics.MOST_OF_A_GRADIENT)

    # Which tensors are the same -------------------------------------------------------------------

    @functools.cached_property
    def offsets(self) -> list[int]:
        """Of each data rank the number of its first microbatch in the reference, and the number of all."""
        return [0, *itertools.accumulate(self.counts)]

    def events(self, stage: Stage) -> Iterator[tuple[OfRank, Observed]]:
        """Return what each rank has seen of a stage."""
        for rank in self.ranks:
            for seen in rank.events.values():
                if seen.stage == stage:
                    yield rank, seen

    def there(self, key: Key, rank: OfRank) -> Key:
        """Return the key of the same microbatch in the reference."""
        return (*key[:3], self.offsets[rank.data_rank] + key[3], *key[4:])

    def pair(self, key: Key) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a full tensor as the baseline and the oracle have it; None if one has none."""
        base, exact = self.baseline.tensors.get(key), self.oracle.tensors.get(key)
        return None if base is None or exact is None else (base, exact)

    def exact(self, stage: Stage) -> dict[Key, torch.Tensor]:
        """Return the oracle's full tensors of a stage."""
        return {key: tensor for key, tensor in self.oracle.tensors.items() if key[0] == stage}

    def groups(self, rank: OfRank) -> dict[str, list[int]]:
        """Return the data ranks that share each single dimension of the data with a rank."""
        dims = [(name, size) for name, size in self.request.mesh if name in self.request.data_dims]
        found, stride = {}, self.request.data_size
        for name, size in dims:
            stride //= size
            at = rank.data_rank // stride % size
            found[name] = [rank.data_rank + (other - at) * stride for other in range(size)]
        return found if len(dims) > 1 else {}

    # Sketches -------------------------------------------------------------------------------------

    def assembled(self, key: Key, rank: OfRank) -> torch.Tensor | None:
        """Return the sketch of a full gradient, of this rank's part and of those of others that it lacks."""
        near = sorted(self.ranks, key=lambda other: abs(other.rank - rank.rank))
        parts = _parts({one.rank: one.events[key] for one in near if key in one.events})
        boxes = None if parts is None else distinct(parts)
        if boxes is None:
            return None
        return torch.stack([digest(tensor, box).numbers[:K] for box, tensor in boxes.items()]).sum(0)

    def sums(self) -> dict[str, torch.Tensor]:
        """Return the sketches of what all microbatches contribute to each gradient together."""
        return {name: total(parts) for name, parts in self.contributions().items()}

    def contributions(self) -> dict[str, dict[int, list[torch.Tensor]]]:
        """Return the sketches of what each microbatch contributes to each of the baseline's gradients, by data rank."""
        found: dict[str, dict[int, list[torch.Tensor]]] = {}
        for key, vector in self.baseline.tensors.items():
            if key[0] == Stage.OWN_GRADIENT:
                reader = sum(key[3] >= offset for offset in self.offsets[1:])
                if reader < len(self.counts):
                    found.setdefault(key[2], {}).setdefault(reader, []).append(vector.double())
        return found

    # Factors --------------------------------------------------------------------------------------

    def common(self, stage: Stage) -> float | None:
        """Return by what all gradients of a stage are the reference's on the first rank; None without one factor."""
        found = []
        for key, exact in self.exact(stage).items():
            mine, whole = self.assembled(key, self.ranks[0]), digest(exact, Box(tuple(exact.shape))).numbers[:K]
            factor, rest = (0.0, 1.0) if mine is None else fit(mine.double(), whole.double())
            if rest > self.like:
                return None
            found.append(factor)
        factors = torch.tensor(found, dtype=torch.float64)
        middle = float(factors.median()) if found else 0.0
        return middle if middle and bool(((factors - middle).abs() <= self.near * abs(middle)).all()) else None

    def at_step(self) -> float | None:
        """Return the factor of gradients as the optimizer gets them, of which clipping is no part."""
        for key, seen in self.ranks[0].events.items():
            if key[0] == Stage.TOTAL_NORM and seen.value.numel() == 1 and (pair := self.pair(key)) is not None:
                exact = float(pair[1])
                return float(self.norm(key, self.ranks[0])) / exact if exact else None
        return self.common(Stage.CLIPPED_GRADIENT)

    @functools.cached_property
    def added_to_norms(self) -> float:
        """By what a clipped gradient may be too small, relative to it, because of what clipping adds to each norm.

        Torch 2.9 adds it to the part of each rank, before it reduces them.
        """
        found = [0.0]
        for key, seen in self.ranks[0].events.items():
            if key[0] == Stage.TOTAL_NORM and seen.layout is not None and (parts := len(seen.layout.pending)):
                norm = float(self.norm(key, self.ranks[0]))
                found += [numerics.ADDED_TO_NORM * math.sqrt(parts) / norm] if norm else []
        return max(found)

    def norm(self, key: Key, rank: OfRank) -> torch.Tensor:
        """Return a total norm that a rank has computed, in float64, also where it is still to be reduced."""
        seen = rank.events[key]
        if seen.layout is None or not seen.layout.pending:
            return seen.value.double()
        kind = rank.norm_types[min(key[4], len(rank.norm_types) - 1)] if rank.norm_types else 2.0
        held = [self.ranks[one].events.get(key) for one in seen.layout.pending]
        parts = torch.stack([one.value.double() for one in held if one is not None])
        norm: torch.Tensor = torch.linalg.vector_norm(parts, kind)
        return norm

    def named(self, factor: float) -> tuple[float, str]:
        """Return a factor and its name; one that is a size or one divided by a size is exactly that."""
        for value, before in ((factor, ""), (1 / factor if factor else 0.0, "1 / ")):
            fits = [name for name, size in self.request.mesh if size > 1 and abs(value - size) <= self.near * size]
            if abs(value - 1) <= self.near:
                return 1.0, "1"
            if fits:
                size = float(dict(self.request.mesh)[fits[0]])
                return 1 / size if before else size, f"{before}the size of {' or '.join(fits)}"
        sizes = products(dict(self.request.mesh)) | {"the number of microbatches": float(self.counts[0])}
        return float(f"{factor:.6g}"), name_of_factor(factor, sizes, spread=self.near)


def _parts(held: Mapping[int, Observed]) -> list[Held] | None:
    """What ranks hold of a tensor; None where its place is not known, or a sum is still to be made."""
    found = []
    for rank, one in held.items():
        if one.layout is None or one.layout.pending:
            return None
        found.append(Held(rank, one.layout, one.value))
    return found


def full_of(held: Mapping[int, Observed]) -> torch.Tensor | None:
    """Assemble a full tensor of what each rank holds of it; None where that is not known or leaves elements out."""
    parts = _parts(held)
    return None if parts is None else full_tensor(parts)


def state_of(ranks: Sequence[ByKey]) -> dict[Key, torch.Tensor]:
    """Assemble the state of a run from that of its ranks."""
    keys = dict.fromkeys(key for seen in ranks for key in seen)
    found = {key: full_of({rank: seen[key] for rank, seen in enumerate(ranks) if key in seen}) for key in keys}
    return {key: full for key, full in found.items() if full is not None}
