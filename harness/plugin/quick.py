"""Chooses one item for each requirement: what ``--effort quick`` runs. Depends on neither pytest nor torch."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from shardproof.harness.plugin.pairwise import WORLD


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One item of an implementation.

    Attributes:
        file: the file of its case.
        function: the name of its test function, in the file.
        requirements: the requirements that it checks.
        runs: whether the host and the implementation have what it needs.
        is_meant: whether its parameters mean something of their own on so few ranks.
        values: the values of its parameters, by name, as texts.
        places: the places of these values in the lists of the case.
        size: the number of ranks.
    """

    file: str
    function: str
    requirements: tuple[str, ...]
    runs: bool = True
    is_meant: bool = True
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    places: tuple[int, ...] = ()
    size: int = 1


class _Used:
    """How often the chosen items of a file have each value of a parameter, and each number of ranks."""

    def __init__(self) -> None:
        self._counts: collections.Counter[tuple[str, str, str]] = collections.Counter()

    def add(self, one: Candidate) -> None:
        self._counts.update(self._keys(one))

    def of(self, one: Candidate) -> int:
        return sum(self._counts[key] for key in self._keys(one))

    def _keys(self, one: Candidate) -> list[tuple[str, str, str]]:
        return [(one.file, name, value) for name, value in (*one.values.items(), (WORLD, repr(one.size)))]


def choose(candidates: Sequence[Candidate]) -> list[int]:
    """Choose one item for each requirement.

    Requirements choose in the order in which they first occur:

    - A requirement takes the first of its functions that has an item which can run and that no requirement has taken;
      if there is none, the first with an item that can run. If no item can run, it takes one all the same, and the
      verdict says what is missing.
    - Of the function's items it takes the one whose values were taken least often in this file, so that the cases of a
      chapter have them in turn; of several, the one whose values stand last in their lists, because lists begin with
      what is plain and end with what is special; of several, the one with the fewest ranks.

    Args:
        candidates: the items of one implementation, in an order that is always the same.

    Returns:
        The chosen positions in ``candidates``, in ascending order.
    """
    functions: dict[str, dict[tuple[str, str], list[int]]] = {}
    for index, candidate in enumerate(candidates):
        for name in candidate.requirements:
            of_one = functions.setdefault(name, collections.defaultdict(list))
            of_one[candidate.file, candidate.function].append(index)
    chosen: set[int] = set()
    taken: set[tuple[str, str]] = set()
    used = _Used()
    for by_function in functions.values():
        can_run = {key: [index for index in items if candidates[index].runs] for key, items in by_function.items()}
        choices = {key: items for key, items in can_run.items() if items} or by_function
        function = next((key for key in choices if key not in taken), next(iter(choices)))
        taken.add(function)
        best = min(choices[function], key=lambda index: _rank(candidates[index], used))
        if best not in chosen:
            chosen.add(best)
            used.add(candidates[best])
    return sorted(chosen)


def _rank(one: Candidate, used: _Used) -> tuple[bool, int, tuple[int, ...], int]:
    return not one.is_meant, used.of(one), tuple(-place for place in one.places), one.size
