"""A choice of few combinations of a case's parameters that together have every pair of values.

Nothing here depends on pytest, on the host or on the implementation under test. Combinations differ in what they need
(capabilities, hardware, ranks), and hosts and implementations differ in what they have. A pair of values is therefore
covered once for each least set of needs among the combinations that have it: whoever can run any combination with the
pair can run a chosen one.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

Part = frozenset[tuple[str, str]]
"""Some parameters with their values, as (name, text of the value)."""

WORLD = "world"
"""The name of the number of ranks in a part."""


@dataclasses.dataclass(frozen=True)
class Combination:
    """The parameters of one item of a case, and what it needs.

    Attributes:
        values: the text of each parameter's value, by name. Values are equal if their texts are.
        size: the number of ranks, which is a value too and must be there.
        needs: names of what else must be there for the item to run.
    """

    values: Mapping[str, str]
    size: int
    needs: frozenset[str] = frozenset()

    def parts(self) -> Iterator[Part]:
        """What should be covered: each pair of values, a single parameter's value, and the number of ranks."""
        yield frozenset({(WORLD, repr(self.size))})
        yield from map(frozenset, itertools.combinations(self.values.items(), min(2, len(self.values))))

    def has(self, part: Part) -> bool:
        """Return whether the combination has these values."""
        return part <= self.values.items() | {(WORLD, repr(self.size))}

    def is_easier_than(self, other: "Combination") -> bool:
        """Return whether whoever can run ``other`` can run this one as well, but not the reverse."""
        here, there = (self.size, self.needs), (other.size, other.needs)
        return self.size <= other.size and self.needs <= other.needs and here != there


def cover(combinations: Sequence[Combination], *, always: Iterable[Part] = ()) -> list[int]:
    """Choose combinations that have every pair of values, and every number of ranks, that any combination has.

    The choice is greedy: the next combination is the one with most of what is not covered yet; of several, one with the
    fewest ranks; of several, the first. It depends on the arguments alone, and so on the order of the combinations.

    ``always`` has further sets of values to cover, such as the combinations of a seed test. A set that no combination
    has is ignored. Returns the chosen positions in ascending order.
    """
    parts = {part for combination in combinations for part in combination.parts()} | set(always)
    groups = [group for part in parts for group in _easiest(combinations, part)]
    uncovered = collections.Counter(index for group in groups for index in group)
    chosen = []
    while groups:
        best = min(uncovered, key=lambda index: (-uncovered[index], combinations[index].size, index))
        chosen.append(best)
        for group in groups:
            if best in group:
                uncovered.subtract(group)
        groups = [group for group in groups if best not in group]
    return sorted(chosen)


def _easiest(combinations: Sequence[Combination], part: Part) -> Iterator[list[int]]:
    """For each least set of needs with which a combination has these values, the positions of all such combinations."""
    found = [index for index, combination in enumerate(combinations) if combination.has(part)]
    groups: dict[tuple[int, frozenset[str]], list[int]] = collections.defaultdict(list)
    for index in found:
        one = combinations[index]
        if not any(combinations[other].is_easier_than(one) for other in found):
            groups[one.size, one.needs].append(index)
    yield from groups.values()
