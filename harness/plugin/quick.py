"""Chooses one item for each requirement: what ``--effort quick`` runs. Depends on neither pytest nor torch."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from shardproof.harness.plugin.pairwise import WORLD


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One item of an implementation.

    Attributes:
        file: the file of its case.
        function: the name of its test function, in the file.
        requirements: the requirements that it checks.
        runs: whether the host and the implementation have what it needs.
        needs: how many capabilities and kinds of hardware it needs.
        is_meant: whether its parameters mean something of their own on so few ranks.
        values: the values of its parameters, by name, as texts.
        places: the places of these values in the lists of the case.
        size: the number of ranks.
    """

    file: str
    function: str
    requirements: tuple[str, ...]
    runs: bool = True
    needs: int = 0
    is_meant: bool = True
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    places: tuple[int, ...] = ()
    size: int = 1


_Function = tuple[str, str]
"""A file and the name of a function in it."""


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

    Requirements with the fewest functions choose first; of several, those that occur first.

    - A requirement takes a function with an item that can run; of several, one that no requirement has taken; of
      several, the one whose items need most, because a case looks at what it needs; of several, the first. If no item
      can run, it takes one all the same, and the verdict says what is missing.
    - Of the function's items it takes the one whose values were taken least often in this file, so that the cases of a
      chapter have them in turn; of several, the one whose values stand last in their lists, because lists begin with
      what is plain and end with what is special; of several, the one with the fewest ranks.

    Args:
        candidates: the items of one implementation, in an order that is always the same.

    Returns:
        The chosen positions in ``candidates``, in ascending order.
    """
    chosen: set[int] = set()
    taken: set[_Function] = set()
    used = _Used()
    for functions in sorted(_choices(candidates), key=len):
        function = min(functions, key=lambda key: (key in taken, -max(candidates[i].needs for i in functions[key])))
        taken.add(function)
        best = min(functions[function], key=lambda index: _rank(candidates[index], used))
        if best not in chosen:
            chosen.add(best)
            used.add(candidates[best])
    return sorted(chosen)


def _choices(candidates: Sequence[Candidate]) -> Iterator[dict[_Function, list[int]]]:
    """For each requirement, its functions with the items that can run; those that cannot, where no function can."""
    by_requirement: dict[str, dict[_Function, list[int]]] = {}
    for index, candidate in enumerate(candidates):
        for name in candidate.requirements:
            functions = by_requirement.setdefault(name, collections.defaultdict(list))
            functions[candidate.file, candidate.function].append(index)
    for functions in by_requirement.values():
        can_run = {key: [index for index in items if candidates[index].runs] for key, items in functions.items()}
        yield {key: items for key, items in can_run.items() if items} or functions


def _rank(one: Candidate, used: _Used) -> tuple[bool, int, tuple[int, ...], int]:
    return not one.is_meant, used.of(one), tuple(-place for place in one.places), one.size
