"""A full tensor of what ranks hold of it, or the sketch of one of the sketches of its parts."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.tensors.layouts import Layout, put_into


class Held(NamedTuple):
    """What one rank holds of a tensor.

    Attributes:
        rank: the global rank.
        layout: which elements of the full tensor they are.
        value: the elements in their order, or a linear sketch of them (float64 [K]).
    """

    rank: int
    layout: Layout
    value: torch.Tensor


def distinct(parts: Iterable[Held]) -> dict[Box, torch.Tensor] | None:
    """Return the values of those parts that are the full tensor together; None if some elements are on no rank.

    Of several ranks with the same elements the first counts, so a rank that comes first sees its own. A sum that is
    still to be made over ranks is made of those of its parts that there are.
    """
    found: dict[Box, torch.Tensor] = {}
    sums: dict[Box, tuple[int, ...]] = {}
    for rank, layout, value in parts:
        if not layout.pending:
            found.setdefault(layout.box, value)
        elif rank in sums.setdefault(layout.box, layout.pending):  # of replicas of such a sum, one set makes it
            found[layout.box] = found[layout.box] + value if layout.box in found else value
    first = next(iter(found), None)
    if first is None:
        return None
    if first.is_full:
        return {first: found[first]}
    return found if sum(box.numel for box in found) == math.prod(first.shape) else None


def full_tensor(parts: Iterable[Held], dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """Return the full tensor, contiguous, of a dtype or that of its first part; None if elements are on no rank."""
    found = distinct(parts)
    if found is None:
        return None
    first = next(iter(found))
    if first.is_full:
        return found[first].reshape(first.shape).to(dtype or found[first].dtype)
    full = torch.empty(first.shape, dtype=dtype or found[first].dtype)
    for box, value in found.items():
        put_into(full, box, value)
    return full


def full_sketch(parts: Iterable[Held]) -> torch.Tensor | None:
    """Return the sketch of the full tensor of sketches of its parts (float64 [K]); None if elements are on no rank."""
    found = distinct(parts)
    return None if found is None else torch.stack(list(found.values())).sum(0)
