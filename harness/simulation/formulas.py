"""What a rank should hold and a group should move, by sizes alone: nothing here asks torch or an implementation."""

from __future__ import annotations

import math
from collections.abc import Iterable

from shardproof.harness.adapters.traits import Traits, padded_to_rows

Shape = tuple[int, ...]


def chunk(length: int, parts: int, index: int) -> int:
    """Return the length of one of ``parts`` chunks as ``torch.chunk`` cuts them, which may be 0 for the last ones."""
    size = math.ceil(length / parts)
    return max(0, min(length - index * size, size))


def share_of(shape: Shape, parts: int, index: int) -> Shape:
    """Return the shape of a rank's chunk of a parameter, along its first dimension."""
    return (chunk(shape[0], parts, index), *shape[1:]) if shape else shape


def is_by_rows(traits: Traits) -> bool:
    """Whether each parameter is cut by itself, and not the flat parameter of its unit."""
    return traits.local_numel is padded_to_rows


def share_numel(shapes: Iterable[Shape], parts: int, traits: Traits) -> int:
    """Return the elements that each rank holds of a unit, with the padding up to equal shares.

    Args:
        shapes: the shapes of the unit's parameters, as tensor parallelism has left them. In a flat parameter each of
            them must have a multiple of four elements, so that nothing is aligned between them.
        parts: the number of ranks that share the unit.
        traits: those of the implementation.
    """
    shapes = list(shapes)
    if is_by_rows(traits):
        return sum(math.ceil(shape[0] / parts) * math.prod(shape[1:]) if shape else 1 for shape in shapes)
    assert all(math.prod(shape) % 4 == 0 for shape in shapes), f"{shapes}: a flat parameter aligns these"
    return math.ceil(sum(map(math.prod, shapes)) / parts)
