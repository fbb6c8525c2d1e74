"""Which known mistake made exactly this tensor? One search for the suites, the doctor and comparisons of recordings.

A gradient that is right is one factor times the sum of what all ranks computed from all their microbatches. A mistake
is another sum of the same parts: without some ranks, of one microbatch alone, with one part twice. So the search works
on vectors of any length: a flattened tensor, or its sketch (``tensors.fingerprints``), which is linear too.

The table of signatures is ``judging.codes``. Those of sums are told from vectors (:func:`diagnose`), those of norms
and of rounding from values (:func:`guess_norm` and :func:`guess_from_values`); of the others there is nothing to
compare, and the doctor's checks tell them. A signature never decides a verdict.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.finding import Guess
from shardproof.harness.judging.numerics import ulp
from shardproof.harness.judging.texts import ranks_of

#: The dtypes to which a wider tensor may have been rounded on its way, coarsest first, with their names in messages.
_NARROW = ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"))

#: Elements other than zero from which it is no accident that all of them have one factor, or fit a narrower dtype.
_ENOUGH = 4

#: Ranks beyond which only named groups of ranks are tried, and no single ones left out or counted twice.
_MOST_RANKS = 64


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What a gradient is.

    Attributes:
        signature: its code in ``judging.codes``.
        text: a predicate of the gradient: "has the last of 4 microbatches only".
        factor: by what the sum of its parts is multiplied.
        residual: the relative distance to that.
        missing: the ranks whose parts are missing from it.
        weights: how many factors were chosen to come near to it.
    """

    signature: str
    text: str
    factor: float
    residual: float
    missing: tuple[int, ...] = ()
    weights: int = 1


Parts = Mapping[int, Sequence[torch.Tensor]]
"""By rank, its own gradient of each microbatch, as float64 vectors of one length; an absent rank has none."""


@dataclasses.dataclass(frozen=True)
class _Candidate:
    signature: str
    text: str
    vector: torch.Tensor
    missing: tuple[int, ...] = ()


def fit(seen: torch.Tensor, parts: torch.Tensor) -> tuple[float, float]:
    """Return the factor by which ``parts`` comes nearest to ``seen``, and the relative distance that remains.

    Both are float64 vectors of one length. The distance is infinite where one of them is zero and the other is not.
    """
    squares, size = float(parts @ parts), float(seen.norm())
    if squares == 0 or size == 0:
        return 0.0, 0.0 if squares == size == 0 else math.inf
    factor = float(seen @ parts) / squares
    return factor, float((seen - factor * parts).norm()) / size


def total(own: Parts) -> torch.Tensor:
    """Return the sum of all parts."""
    return torch.stack([one for parts in own.values() for one in parts]).sum(0)


def diagnose(
    seen: torch.Tensor,
    own: Parts,
    *,
    rank: int,
    groups: Mapping[str, Sequence[int]],
    earlier: Sequence[torch.Tensor] = (),
    tolerance: float,
) -> Diagnosis | None:
    """Name what a gradient is.

    Args:
        seen: the gradient as ``rank`` has it, assembled from the shards of the ranks that share it.
        own: its parts.
        groups: the groups of ranks that ``rank`` is in, by name.
        earlier: the sums of all parts of earlier steps, the last step's first.
        tolerance: the relative distance that rounding explains.

    Returns:
        The first of the table that fits; None if none does.
    """
    if not any(own.values()) or not bool(seen.isfinite().all()):
        return None
    of_all = fit(seen, total(own))
    if of_all[1] <= tolerance:
        return Diagnosis(codes.SCALED, "is all of it", *of_all)
    found = [
        Diagnosis(one.signature, one.text, *fit(seen, one.vector), one.missing)
        for one in _candidates(own, rank, groups, earlier)
    ]
    fitting = [one for one in found if one.residual <= tolerance and one.factor > 0]
    # Tolerances of narrow dtypes are wide: of several that fit, the nearest is meant, and the table's order decides
    # between those that are equally near.
    nearest = min((one.residual for one in fitting), default=0.0)
    named = next((one for one in fitting if one.residual <= max(2 * nearest, tolerance / 64)), None)
    if named is not None and named.residual * numerics.NEARER <= of_all[1]:
        return named
    # Several weights come near to a gradient of other parts, too.
    nearer = min(tolerance, of_all[1] / numerics.NEARER)
    return _mixed(seen, own, rank, nearer) or _with_scaled(seen, own, earlier, nearer)


def _candidates(
    own: Parts, rank: int, groups: Mapping[str, Sequence[int]], earlier: Sequence[torch.Tensor]
) -> Iterator[_Candidate]:
    by_rank = {one: torch.stack(list(own[one])).sum(0) for one in sorted(own) if own[one]}
    yield from _of_groups(by_rank, sorted(own), rank, groups)
    counts = {len(parts) for parts in own.values()}
    if len(counts) == 1 and (count := counts.pop()) > 1:
        by_number = [torch.stack([parts[number] for parts in own.values()]).sum(0) for number in range(count)]
        yield from _of_microbatches(by_number, "")
        if rank in own:
            yield from _of_microbatches(list(own[rank]), "this rank's own of ")
    whole = torch.stack(list(by_rank.values())).sum(0)
    if 1 < len(by_rank) <= _MOST_RANKS:
        yield from _of_single_ranks(by_rank, sorted(own), rank, whole)
    yield from _of_earlier_steps(whole, earlier)


def _of_groups(
    by_rank: Mapping[int, torch.Tensor], everyone: Sequence[int], rank: int, groups: Mapping[str, Sequence[int]]
) -> Iterator[_Candidate]:
    """Yield the sums over one rank, over each of its groups, and over blocks and strides that may be a group."""
    if rank in by_rank and len(by_rank) > 1:
        missing = tuple(one for one in everyone if one != rank)
        yield _Candidate(codes.UNREDUCED, "is this rank's own gradient", by_rank[rank], missing)
    for name, members in groups.items():
        inside = [one for one in members if one in by_rank]
        if len(inside) > 1 and not set(everyone) <= set(members):
            yield _reduced_over(f"{name} ({ranks_of(members)})", inside, by_rank, set(everyone) - set(members))
    for some in _blocks_and_strides(list(by_rank), rank):
        yield _reduced_over(ranks_of(some), some, by_rank, set(everyone) - set(some))


def _reduced_over(
    which: str, inside: Sequence[int], by_rank: Mapping[int, torch.Tensor], missing: Iterable[int]
) -> _Candidate:
    ranks = tuple(sorted(missing))
    text = f"is reduced over {which} only: {ranks_of(ranks)} are missing"
    return _Candidate(codes.SOME_RANKS, text, torch.stack([by_rank[one] for one in inside]).sum(0), ranks)


def _of_single_ranks(
    by_rank: Mapping[int, torch.Tensor], everyone: Sequence[int], rank: int, whole: torch.Tensor
) -> Iterator[_Candidate]:
    for other, vector in by_rank.items():
        if other != rank:
            missing = tuple(one for one in everyone if one != other)
            yield _Candidate(codes.UNREDUCED, f"is the gradient of rank {other} alone", vector, missing)
    for other, vector in by_rank.items():
        yield _Candidate(codes.SOME_RANKS, f"is reduced without rank {other}", whole - vector, (other,))
        yield _Candidate(codes.SOME_RANKS, f"counts rank {other} twice", whole + vector)


def _of_earlier_steps(whole: torch.Tensor, earlier: Sequence[torch.Tensor]) -> Iterator[_Candidate]:
    for number, before in enumerate(itertools.accumulate(earlier)):
        since = "the step before" if number == 0 else f"the {number + 1} steps before"
        yield _Candidate(
            codes.SOME_MICROBATCHES, f"still contains the gradients of {since}: they were never zeroed", whole + before
        )
    for number, before in enumerate(earlier):
        text = "is the gradient of the step before" if number == 0 else f"is the gradient of {number + 1} steps before"
        yield _Candidate(codes.MISPLACED, text, before)


def _blocks_and_strides(ranks: Sequence[int], rank: int) -> Iterator[Sequence[int]]:
    """Yield the groups that a rank may have been given: consecutive ranks, as of a host, and ranks at one distance."""
    if rank not in ranks:
        return
    count, place = len(ranks), ranks.index(rank)
    for size in (one for one in range(2, count) if count % one == 0):
        first = place - place % size
        yield ranks[first : first + size]
        yield ranks[place % (count // size) :: count // size]


def _of_microbatches(parts: Sequence[torch.Tensor], whose: str) -> Iterator[_Candidate]:
    count, whole = len(parts), torch.stack(list(parts)).sum(0)
    single = "has the {0} of {1} microbatches only" if not whose else "is " + whose + "the {0} of {1} microbatches only"
    yield _Candidate(codes.SOME_MICROBATCHES, single.format("last", count), parts[-1])
    yield _Candidate(codes.SOME_MICROBATCHES, single.format("first", count), parts[0])
    if whose:
        return
    for number in range(1, count - 1):
        yield _Candidate(codes.SOME_MICROBATCHES, f"has microbatch {number} of {count} only", parts[number])
    for number in range(1, count - 1):
        yield _Candidate(codes.SOME_MICROBATCHES, f"has the last {count - number} of {count} microbatches only",
                         torch.stack(list(parts[number:])).sum(0))  # fmt: skip
    for number in range(2, count):
        yield _Candidate(codes.SOME_MICROBATCHES, f"has the first {number} of {count} microbatches only",
                         torch.stack(list(parts[:number])).sum(0))  # fmt: skip
    for number, part in enumerate(parts):
        yield _Candidate(codes.SOME_MICROBATCHES, f"lacks microbatch {number} of {count}", whole - part)
        yield _Candidate(codes.SOME_MICROBATCHES, f"counts microbatch {number} of {count} twice", whole + part)
    halves = [part * 2.0**number for number, part in enumerate(parts)]
    yield _Candidate(codes.SOME_MICROBATCHES, "is a running average: each of "
                     f"{count} microbatches counts half as much as the next one",
                     torch.stack(halves).sum(0))  # fmt: skip
    growing = [part * 2.0 ** (count - 1 - number) for number, part in enumerate(parts)]
    yield _Candidate(codes.SOME_MICROBATCHES, "is doubled with each microbatch: each of "
                     f"{count} counts twice as much as the next one",
                     torch.stack(growing).sum(0))  # fmt: skip


def _mixed(seen: torch.Tensor, own: Parts, rank: int, tolerance: float) -> Diagnosis | None:
    """Try sums of a part that is reduced and one that is not, and then any weights of microbatches."""
    counts = {len(parts) for parts in own.values()}
    if len(counts) != 1 or (count := counts.pop()) < 2:
        return None
    by_number = [torch.stack([parts[number] for parts in own.values()]).sum(0) for number in range(count)]
    if rank in own and len(own) > 1:
        found = _partly_reduced(seen, by_number, own[rank], tolerance)
        if found is not None:
            return found
    weights = _weights(seen, by_number) if len(seen) > count else None
    # Of a gradient of few elements any sum is one of its parts, with weights that no loop makes.
    if weights is None or weights[1] > tolerance or min(weights[0]) <= 0:
        return None
    listed = ", ".join(f"{weight:.4g}" for weight in weights[0])
    text = f"has microbatches of different weights: {listed}"
    return Diagnosis(codes.WEIGHTED, text, weights[0][0], weights[1], weights=count)


def _partly_reduced(
    seen: torch.Tensor, by_number: Sequence[torch.Tensor], own: Sequence[torch.Tensor], tolerance: float
) -> Diagnosis | None:
    """Try sums of some microbatches of all ranks and this rank's others."""
    count = len(by_number)
    splits = [("last", by_number[-1:], own[:-1])]
    splits += [(f"first {n}" if n > 1 else "first", by_number[:n], own[n:]) for n in range(1, count)]
    for which, reduced, rest in splits:
        sums = [torch.stack(list(parts)).sum(0) for parts in (reduced, rest)]
        if (found := _weights(seen, sums)) is not None and found[1] <= tolerance:
            text = f"has the {which} of {count} microbatches of all ranks, and this rank's own of the others"
            return Diagnosis(codes.UNREDUCED, text, found[0][0], found[1], weights=2)
    return None


def _with_scaled(seen: torch.Tensor, own: Parts, earlier: Sequence[torch.Tensor], tolerance: float) -> Diagnosis | None:
    """Try the sum of all parts and that of the step before, of which clipping has changed the factor."""
    if not earlier or (found := _weights(seen, [total(own), earlier[0]])) is None or min(found[0]) <= 0:
        return None
    text = "still contains the gradients of the step before: they were never zeroed"
    return Diagnosis(codes.SOME_MICROBATCHES, text, found[0][0], found[1], weights=2) if found[1] <= tolerance else None


def _weights(seen: torch.Tensor, parts: Sequence[torch.Tensor]) -> tuple[list[float], float] | None:
    matrix = torch.stack(list(parts), dim=1)
    if not bool(matrix.isfinite().all()):
        return None
    weights = torch.linalg.lstsq(matrix, seen.unsqueeze(1)).solution.squeeze(1)
    if not bool(weights.isfinite().all()) or float(seen.norm()) == 0:
        return None
    return weights.tolist(), float((matrix @ weights - seen).norm() / seen.norm())


def name_of_factor(factor: float, sizes: Mapping[str, float], *, spread: float = numerics.NAMED_FACTOR) -> str:
    """Name a factor by the sizes of a run: "1 / the size of dp", "the square root of the size of tp"; "" if none fits.

    Args:
        sizes: numbers by what they are, such as "the size of dp".
        spread: the relative distance within which it is exactly that.
    """
    singles = [(name, value) for name, value in sizes.items() if value not in (0, 1)]
    products = [(name, value) for name, value in singles]
    products += [(f"{a} x {b}", x * y) for (a, x), (b, y) in itertools.combinations(singles, 2)]
    choices = [("1", 1.0)]
    choices += products + [(f"1 / ({name})" if " x " in name else f"1 / {name}", 1 / value) for name, value in products]
    choices += [(f"{a} / {b}", x / y) for (a, x), (b, y) in itertools.permutations(singles, 2)]
    choices += [(f"the square root of {name}", value**0.5) for name, value in singles]
    choices += [(f"1 / the square root of {name}", value**-0.5) for name, value in singles]
    return next((name for name, value in choices if abs(factor - value) <= spread * abs(value)), "")


# Guesses of the suites, which have the oracle.


def guess_gradient(
    sharded: torch.Tensor, oracle: torch.Tensor, own: Sequence[torch.Tensor | None], rank: int
) -> Guess | None:
    """Guess the cause of a wrong gradient.

    Args:
        sharded: this rank's shard, of any shape.
        oracle: the same shard of the oracle's gradient, the average over ``len(own)`` ranks.
        own: the same shard of each rank's gradient before the average; None for a rank without a gradient.
        rank: this rank's position in ``own``.
    """
    if sharded.numel() and not bool(sharded.any()):
        return Guess("it is zero")
    size, seen = len(own), sharded.double().flatten()
    for factor, cause in _factors(size):
        if _alike(sharded, oracle * factor):
            return Guess(f"it is {factor:.4g} times the oracle's everywhere", cause)
    parts = {index: [gradient.double().flatten()] for index, gradient in enumerate(own) if gradient is not None}
    found = diagnose(seen, parts, rank=rank, groups={}, tolerance=numerics.LIKENESS) if parts else None
    if found is None or found.signature == codes.SCALED:
        return None
    if found.signature == codes.UNREDUCED:
        change = "" if _near(found.factor, 1) else f" divided by {1 / found.factor:.4g}"
        return Guess(f"it {found.text}{change}", "the reduction over the ranks is missing")
    return Guess(f"it {found.text}") if _near(found.factor, 1 / size) else None


def guess_weights(sharded: torch.Tensor, shares: Mapping[str, torch.Tensor]) -> Guess | None:
    """Guess that parts of the whole batch count more or less than in its one loss; ``shares`` add up to its gradient.

    A shard with fewer than twice as many elements as there are parts tells nothing.
    """
    if not shares or sharded.numel() < 2 * len(shares):
        return None
    found = _weights(sharded.double().flatten(), [one.double().flatten() for one in shares.values()])
    if found is None or found[1] > numerics.LIKENESS:
        return None
    listed = [f"{name} x {weight:.4g}" for name, weight in zip(shares, found[0], strict=True)]
    return Guess(
        f"it counts parts of the batch more or less than the loss of the whole batch does: {', '.join(listed[:8])}"
        + ", ..." * (len(listed) > 8),
        "the loss of each part is divided by its own tokens, not by the tokens of all parts",
    )


def _factors(size: int) -> list[tuple[float, str]]:
    """The factors by which mistakes in averaging over ``size`` ranks scale a gradient, with the mistake."""
    if size == 1:
        return []
    return [
        (float(size), f"the division by the {size} ranks is missing or an average is a sum"),
        (1.0 / size, f"the average over the {size} ranks is divided twice"),
        (float(size) ** 2, "a sum is multiplied instead of divided"),
    ]


def guess_from_values(sharded: torch.Tensor, oracle: torch.Tensor, *, magnitude: float) -> Guess | None:
    """Guess from a tensor's values alone: it was rounded to a narrower dtype, or scaled.

    ``magnitude`` is the largest absolute value of the oracle's full tensor.
    """
    return next(_guesses_from_values(sharded, oracle, magnitude), None)


def _guesses_from_values(sharded: torch.Tensor, oracle: torch.Tensor, magnitude: float) -> Iterator[Guess]:
    is_wide = sharded.dtype in (torch.float32, torch.float64)
    has_enough = int(oracle.count_nonzero()) >= _ENOUGH
    for dtype, name in _NARROW if is_wide else ():
        if _is_rounded(sharded, oracle, dtype):
            yield Guess(f"it equals the expected value rounded to {name}")
        if has_enough and _is_rounded(sharded, sharded, dtype) and not _is_rounded(oracle, oracle, dtype):
            yield Guess(f"all of its elements are {name} numbers: it was rounded to {name} on its way")
    factor = _common_factor(sharded, oracle) if has_enough else None
    if factor is not None:
        yield Guess(f"it is {factor:.4g} times the oracle's everywhere")
    if is_wide and has_enough:
        yield from _of_errors(sharded, oracle, magnitude)


def _of_errors(sharded: torch.Tensor, oracle: torch.Tensor, magnitude: float) -> Iterator[Guess]:
    """Guess that errors are those of rounding to a narrower dtype, by their size."""
    errors = sharded.double() - oracle.double()
    worst = int(errors.abs().argmax())
    is_far = float(errors.flatten()[worst].abs()) > numerics.NOT_ROUNDED * float(oracle.flatten()[worst].abs())
    if is_far or not _is_noise(errors):
        return
    low, high = numerics.ROUNDING_ULPS
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16 or TF32")):
        if low <= float(errors.abs().max()) / ulp(magnitude, dtype) <= high:
            yield Guess(f"its errors are as large as rounding to {name} makes")


def _is_rounded(value: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(value.double(), exact.to(dtype).double())


def _is_noise(errors: torch.Tensor) -> bool:
    """Whether errors are spread over the elements and have both signs, as those of rounding are."""
    is_spread = float(errors.abs().median()) > float(errors.abs().max()) / 64
    return is_spread and bool((errors > 0).any()) and bool((errors < 0).any())


def guess_norm(sharded: float, oracle: float, local: float, size: int, norm_type: float) -> Guess | None:
    """Guess the cause of a wrong total norm; ``local`` is the norm over this rank's local shards alone."""
    if _near(sharded, local):
        return Guess("it equals the norm of this rank's shards alone", "its reduction over the ranks is missing")
    if norm_type != float("inf") and _near(sharded, oracle * size ** (1 / norm_type)):
        seen = f"it is the oracle's times {size}^(1/{norm_type:g})"
        return Guess(seen, "replicated parts are counted on every rank")
    return None


def _common_factor(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """The factor by which all elements of one tensor differ from those of another, or None if there is none."""
    first, second = first.double().flatten(), second.double().flatten()
    largest = int(second.abs().argmax())
    factor = float(first[largest] / second[largest])
    return factor if abs(factor - 1) > 2 * numerics.LIKENESS and _alike(first, second * factor) else None


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    first, second = first.double(), second.double()
    scale = float(second.abs().max()) if second.numel() else 0.0
    return scale > 0 and float((first - second).abs().max()) <= numerics.LIKENESS * scale


def _near(first: float, second: float) -> bool:
    return abs(first - second) <= numerics.LIKENESS * abs(second)
