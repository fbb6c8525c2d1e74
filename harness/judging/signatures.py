"""Guesses why a tensor is wrong, by comparing it with what common bugs produce. A guess never decides a verdict.

Tensors of the sharded run are this rank's local shards, of any shape, and those of the oracle have the same elements.
A function returns None if no cause that it knows fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardproof.harness.judging.numerics import ulp
from shardproof.harness.verdicts.finding import Guess

#: Relative difference up to which a wrong tensor counts as equal to what a suspected bug produces. It affects the
#: text of a failure only, never the verdict.
_LIKENESS = 1e-3

#: The dtypes to which a wider tensor may have been rounded on its way, coarsest first, with their names in messages.
_NARROW = ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"))

#: Elements other than zero from which it is no accident that all of them have one factor, or fit a narrower dtype.
_ENOUGH = 4

#: An error of rounding to a dtype is at most half an ulp. The largest of many is seldom below a quarter, and a sum of a
#: few rounded values has a few times the error of one.
_ROUNDING_ULPS = (0.25, 4.0)


def guess_gradient(
    sharded: torch.Tensor, oracle: torch.Tensor, own: Sequence[torch.Tensor | None], rank: int
) -> Guess | None:
    """Guess the cause of a wrong gradient.

    Args:
        oracle: the same shard of the oracle's gradient, the average over ``len(own)`` ranks.
        own: the same shard of each rank's gradient before the average; None for a rank without a gradient.
        rank: this rank's position in ``own``.
    """
    if sharded.numel() and not bool(sharded.any()):
        return Guess("it is zero")
    return next(_guesses(sharded, oracle, own, rank), None)


def _guesses(
    sharded: torch.Tensor, oracle: torch.Tensor, own: Sequence[torch.Tensor | None], rank: int
) -> Iterator[Guess]:
    size = len(own)
    for factor, cause in _factors(size):
        if _alike(sharded, oracle * factor):
            yield Guess(f"it is {factor:.4g} times the oracle's everywhere", cause)
    for index, gradient in enumerate(own):
        for factor, change in ((1.0, ""), (1.0 / size, f" divided by {size}")):
            if gradient is not None and _alike(sharded, gradient * factor):
                whose = "this rank's own gradient" if index == rank else f"the gradient of rank {index} alone"
                yield Guess(f"it equals {whose}{change}", "the reduction over the ranks is missing")
    for index, gradient in enumerate(own):
        for sign, times in ((1, "twice"), (-1, "not at all")):
            if gradient is not None and size > 1 and _alike(sharded, oracle + sign * gradient / size):
                yield Guess(f"it is the average in which the gradient of rank {index} counts {times}")


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
            yield Guess(f"all of its elements are {name} numbers, as when it was rounded to {name} on its way")
    factor = _common_factor(sharded, oracle) if has_enough else None
    if factor is not None:
        yield Guess(f"it is {factor:.4g} times the oracle's everywhere")
    errors = sharded.double() - oracle.double()
    if is_wide and has_enough and _is_noise(errors):
        for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16 or TF32")):
            low, high = _ROUNDING_ULPS
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
        return Guess("it equals the norm of what this rank alone holds", "its reduction over the ranks is missing")
    if norm_type != float("inf") and _near(sharded, oracle * size ** (1 / norm_type)):
        seen = f"it is the oracle's times {size}^(1/{norm_type:g})"
        return Guess(seen, "replicated parts are counted on every rank")
    return None


def _factors(size: int) -> list[tuple[float, str]]:
    """The factors by which mistakes in averaging over ``size`` ranks scale a gradient, with the mistake."""
    if size == 1:
        return []
    return [
        (float(size), f"the division by the {size} ranks is missing or an average is a sum"),
        (1.0 / size, f"the average over the {size} ranks is divided twice"),
        (float(size) ** 2, "a sum is multiplied instead of divided"),
    ]


def _common_factor(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """The factor by which all elements of one tensor differ from those of another, or None if there is none."""
    first, second = first.double().flatten(), second.double().flatten()
    largest = int(second.abs().argmax())
    factor = float(first[largest] / second[largest])
    return factor if abs(factor - 1) > 2 * _LIKENESS and _alike(first, second * factor) else None


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    first, second = first.double(), second.double()
    scale = float(second.abs().max()) if second.numel() else 0.0
    return scale > 0 and float((first - second).abs().max()) <= _LIKENESS * scale


def _near(first: float, second: float) -> bool:
    return abs(first - second) <= _LIKENESS * abs(second)
