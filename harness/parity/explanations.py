"""Guesses why a tensor is wrong, by comparing it with what common bugs produce. A guess never decides a verdict."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Relative difference up to which a wrong tensor counts as equal to what a suspected bug produces. It affects the
#: text of a failure only, never the verdict.
_LIKENESS = 1e-3


def guess_gradient(
    sharded: torch.Tensor, oracle: torch.Tensor, own: Sequence[torch.Tensor | None], rank: int
) -> str | None:
    """Guess the cause of a wrong gradient.

    Args:
        sharded: the local shard that this rank holds, any shape.
        oracle: the same shard of the oracle's gradient, the average over ``len(own)`` ranks.
        own: the same shard of each rank's gradient before the average; None for a rank without a gradient.
        rank: this rank's position in ``own``.

    Returns:
        A clause for the text of the failure, or None if no known cause fits.
    """
    size = len(own)
    if sharded.numel() and not bool(sharded.any()):
        return "it is zero"
    for factor, meaning in _factors(size):
        if _alike(sharded, oracle * factor):
            return f"it is {factor:.4g} times the oracle's everywhere, as when {meaning}"
    for index, gradient in enumerate(own):
        for factor, change in ((1.0, ""), (1.0 / size, f" divided by {size}")):
            if gradient is not None and _alike(sharded, gradient * factor):
                whose = "this rank's own gradient" if index == rank else f"the gradient of rank {index} alone"
                return f"it equals {whose}{change}, as when the reduction over the ranks is missing"
    return None


def guess_norm(sharded: float, oracle: float, local: float, size: int, norm_type: float) -> str | None:
    """Guess the cause of a wrong total norm.

    Args:
        sharded: the total norm that the implementation returned.
        oracle: the oracle's total norm.
        local: the norm over this rank's local shards alone.
        size: the number of data-parallel ranks.
        norm_type: the p of the norm.

    Returns:
        A clause for the text of the failure, or None if no known cause fits.
    """
    if _near(sharded, local):
        return "it equals the norm of what this rank alone holds, as when its reduction over the ranks is missing"
    if norm_type != float("inf") and _near(sharded, oracle * size ** (1 / norm_type)):
        return f"it is the oracle's times {size}^(1/{norm_type:g}), as when replicated parts are counted on every rank"
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


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    first, second = first.double(), second.double()
    scale = float(second.abs().max()) if second.numel() else 0.0
    return scale > 0 and float((first - second).abs().max()) <= _LIKENESS * scale


def _near(first: float, second: float) -> bool:
    return abs(first - second) <= _LIKENESS * abs(second)
