"""What ``--effort quick`` runs: one item of each function, or of each subject that its values name.

Depends on neither pytest nor torch.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from shardproof.harness.plugin.pairs import WORLD


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One item of an implementation.

    Attributes:
        function: the name of its test function, in the file.
        runs: whether the host and the implementation have what it needs.
        is_meant: whether its parameters mean something of their own on so few ranks.
        values: the values of its parameters, by name, as texts.
        places: the places of these values in the lists of the case.
        size: the number of ranks.
        apart: the values that name what it checks, where the function checks different things.
    """

    file: str
    function: str
    requirements: tuple[str, ...]
    runs: bool = True
    is_meant: bool = True
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    places: tuple[int, ...] = ()
    size: int = 1
    apart: tuple[str, ...] = ()

    def values_in_file(self) -> list[tuple[str, str, str]]:
        """The values of its parameters and its number of ranks, in its file."""
        return [(self.file, name, value) for name, value in (*self.values.items(), (WORLD, repr(self.size)))]


def choose(candidates: Sequence[Candidate]) -> list[int]:
    """Choose one item of each function that can run, so that every requirement has one; return ascending positions.

    A function whose values name different things (``apart``) counts as one function for each of them.

    - Functions choose in the order of the candidates. A function of which no item can run has none, unless it is the
      first of a requirement of which nothing can run: the verdict then says what is missing.
    - Of a function's items it takes the one whose values were taken least often in this file, so that the cases of a
      chapter have them in turn; of several, the one whose values stand last in their lists, because lists begin with
      what is plain and end with what is special; of several, the one with the fewest ranks.
    """
    can_run = {name for candidate in candidates if candidate.runs for name in candidate.requirements}
    functions: dict[tuple[str, ...], list[int]] = {}
    for index, candidate in enumerate(candidates):
        functions.setdefault((candidate.file, candidate.function, *candidate.apart), []).append(index)
    chosen = []
    used: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for items in functions.values():
        asked = {name for index in items for name in candidates[index].requirements}
        choices = [index for index in items if candidates[index].runs] or ([] if asked <= can_run else items)
        if choices:
            best = min(choices, key=lambda index: _rank(candidates[index], used))
            chosen.append(best)
            used.update(candidates[best].values_in_file())
            can_run |= asked
    return sorted(chosen)


def _rank(one: Candidate, used: collections.Counter[tuple[str, str, str]]) -> tuple[bool, int, tuple[int, ...], int]:
    times = sum(used[value] for value in one.values_in_file())
    return not one.is_meant, times, tuple(-place for place in one.places), one.size
