"""Where a rank stands on a mesh and what it should hold, by sizes alone: neither torch nor an adapter is asked."""

import dataclasses
import itertools
import math
from collections.abc import Iterable

from shardproof.testing.make import Traits, padded_to_rows


def coordinate_of(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the coordinate of a global rank on a mesh of all ranks, whose last dimension changes fastest."""
    coordinate = []
    for size in reversed(sizes):
        rank, index = divmod(rank, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))


@dataclasses.dataclass(frozen=True)
class MeshCoordinate:
    """One global rank's coordinate on a mesh of all ranks, whose dimensions have these sizes and names."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    rank: int

    def along(self, *names: str) -> tuple[int, ...]:
        """Return, in ascending order, the ranks of this rank's group along the dimensions of these names."""
        found = [0]
        for name, size, own in zip(self.names, self.sizes, coordinate_of(self.rank, self.sizes), strict=True):
            indices = range(size) if name in names else (own,)
            found = [first * size + index for first in found for index in indices]
        return tuple(found)

    def dimensions_of(self, group: tuple[int, ...]) -> str:
        """Return the names of the dimensions that a group runs along, joined by "+"; "" if it is none of the mesh.

        A group of one rank is along no dimension: "none".
        """
        if len(group) == 1:
            return "none"
        for count in range(1, len(self.names) + 1):
            for chosen in itertools.combinations(self.names, count):
                if self.along(*chosen) == tuple(sorted(group)):
                    return "+".join(chosen)
        return ""


def chunk(length: int, parts: int, index: int) -> int:
    """Return the length of one of ``parts`` chunks as ``torch.chunk`` cuts them, which may be 0 for the last ones."""
    size = math.ceil(length / parts)
    return max(0, min(length - index * size, size))


def share_of(shape: tuple[int, ...], parts: int, index: int) -> tuple[int, ...]:
    """Return the shape of a rank's chunk of a parameter, along its first dimension."""
    return (chunk(shape[0], parts, index), *shape[1:]) if shape else shape


def is_by_rows(traits: Traits) -> bool:
    """Whether each parameter is cut by itself, and not the flat parameter of its unit."""
    return traits.local_numel is padded_to_rows


def share_numel(shapes: Iterable[tuple[int, ...]], parts: int, traits: Traits) -> int:
    """Return the elements that each of ``parts`` ranks holds of a unit, with the padding up to equal shares.

    The shapes are those that tensor parallelism has left. In a flat parameter each of them must have a multiple of four
    elements, so that nothing is aligned between them.
    """
    shapes = list(shapes)
    if is_by_rows(traits):
        return sum(math.ceil(shape[0] / parts) * math.prod(shape[1:]) if shape else 1 for shape in shapes)
    assert all(math.prod(shape) % 4 == 0 for shape in shapes), f"{shapes}: a flat parameter aligns these"
    return math.ceil(sum(map(math.prod, shapes)) / parts)
