"""Finds which settings it takes to make a training fail: what cures it alone, and the smallest plan that fails."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

#: The most trials of a search.
MOST = 40


@dataclasses.dataclass(frozen=True)
class Axis:
    """A setting that is on and can be turned off, as the mesh dimension ``tp``, which has size ``1`` then."""

    name: str
    off: str = "off"

    def __str__(self) -> str:
        return f"{self.name} -> {self.off}"


@dataclasses.dataclass(frozen=True)
class TrialOutcome:
    """How a trial ended. Two trials fail alike if their verdict, stage and signature are the same.

    Attributes:
        signature: of the known mistake that it looks like; empty if it looks like none.
        text: of the failure, in one line; it does not count.
    """

    verdict: str
    stage: str = ""
    signature: str = ""
    text: str = dataclasses.field(default="", compare=False)

    @property
    def passes(self) -> bool:
        return self.verdict == "pass"


Plan = frozenset[Axis]
"""The axes that are on."""

Trial = Callable[[Plan], TrialOutcome]


@dataclasses.dataclass(frozen=True)
class Bisected:
    """What a search has found.

    Attributes:
        first: the outcome with all axes on.
        axes: those that were on.
        smallest: a plan that fails alike, of which no axis can be turned off; as far as the trials sufficed.
        cures: what cures the failure when it is turned off: single axes, or pairs where no single axis does.
        others: other failures that were met on the way, each with the axes that were off.
        trials: how many ran.
        is_complete: whether the search ended before its trials did.
    """

    first: TrialOutcome
    axes: tuple[Axis, ...]
    smallest: tuple[Axis, ...]
    cures: tuple[tuple[Axis, ...], ...]
    others: tuple[str, ...]
    trials: int
    is_complete: bool

    def render(self, command: str, seconds: float) -> str:
        """Return the lines of a report, with the command that repeats the smallest plan."""
        if self.first.passes:
            return f"bisect: it passes with all axes on ({self.trials} trial): there is nothing to search"
        needless = [one.name for one in self.axes if one not in self.smallest]
        lines = [f"bisect: {len(self.axes)} axes are on"]
        if needless:
            lines.append(f"  fails without {', '.join(needless)}")
        if self.cures:
            by = "each alone" if len(self.cures[0]) == 1 else "each pair"
            cures = "; ".join(" with ".join(map(str, cure)) for cure in self.cures)
            lines.append(f"  cured by {by}: {cures}")
        else:
            lines.append("  no axis cures it")
        left = " and ".join(one.name for one in self.smallest) or "no axis"
        ending = "" if self.is_complete else ", which did not suffice"
        lines.append(f"  smallest failing configuration: {left} on   ({self.trials} trials{ending}, {seconds:.0f} s)")
        lines += [f"  another failure: {text}" for text in self.others]
        lines.append(f"  command: {command}")
        return "\n".join(lines)


class _Spent(Exception):
    """The trials are used up."""


class _Search:
    """The trials of a search, each of one plan, and what they have found so far."""

    def __init__(self, axes: Sequence[Axis], trial: Trial, most: int) -> None:
        self._axes, self._full, self._trial, self._most = axes, frozenset(axes), trial, most
        self.outcomes: dict[Plan, TrialOutcome] = {}
        self.first = self._of(self._full)
        self.smallest = list(axes)
        self.cures: list[tuple[Axis, ...]] = []

    def _of(self, plan: Plan) -> TrialOutcome:
        if plan not in self.outcomes:
            if len(self.outcomes) >= self._most:
                raise _Spent
            self.outcomes[plan] = self._trial(plan)
        return self.outcomes[plan]

    def _cure(self, off: tuple[Axis, ...]) -> None:
        """Note axes without which the training passes."""
        self.cures += [off] if self._of(self._full - frozenset(off)).passes else []

    def run(self) -> None:
        """Try axes alone, then the smallest plan, then pairs; _Spent where the trials do not suffice."""
        # What neither passes nor fails alike without an axis needs the axis, and is not cured by turning it off.
        for one in self._axes:
            self._cure((one,))
        self._shrink()
        if not self.cures:
            rest = [one for one in self._axes if one not in self.smallest]
            for pair in itertools.product(self.smallest, rest):
                self._cure(pair)

    def _shrink(self) -> None:
        """Find the smallest plan: with the axes without which it does not fail alike, and as few others as it takes."""
        alike = [one for one in self._axes if self._of(self._full - {one}) == self.first]
        needed = self._full - frozenset(alike)
        for kept in _shrinking(alike, lambda kept: self._of(needed | frozenset(kept)) == self.first):
            self.smallest = [one for one in self._axes if one in needed or one in kept]

    def others(self) -> Iterator[str]:
        """Yield the failures that are not the first one's, each with the axes that were off."""
        for plan, outcome in self.outcomes.items():
            if not outcome.passes and outcome != self.first:
                names = ", ".join(sorted(one.name for one in self._full - plan))
                yield f"without {names}: {outcome.verdict}{outcome.text and ': '}{outcome.text}"


def bisect(axes: Sequence[Axis], trial: Trial, *, most: int = MOST) -> Bisected:
    """Turn axes off until as few are on as still make the training fail alike.

    First each axis alone is turned off, from all that are on: those that cure are in every smallest plan. Then all
    others are turned off together, and where it no longer fails alike, ddmin finds which of them it takes. Where no
    single axis cures, pairs of an axis of the smallest plan and another one are turned off.

    Args:
        axes: those that are on, in the order in which they are turned off.
        trial: runs the training with these axes on; it is called once for a plan, with all axes first.
        most: how many times it may be called.
    """
    search = _Search(axes, trial, most)
    is_complete = True
    if not search.first.passes:
        try:
            search.run()
        except _Spent:
            is_complete = False
    return Bisected(
        search.first, tuple(axes), tuple(search.smallest), tuple(search.cures), tuple(search.others()),
        len(search.outcomes), is_complete,
    )  # fmt: skip


def _shrinking(rest: list[Axis], fails: Callable[[Sequence[Axis]], bool]) -> Iterator[Sequence[Axis]]:
    """Yield smaller and smaller lists that fail, by ddmin; the last one is minimal."""
    if fails([]):
        yield []
        return
    parts = 2
    while len(rest) > 1:
        bounds = [len(rest) * number // parts for number in range(parts + 1)]
        chunks = [rest[start:end] for start, end in itertools.pairwise(bounds)]
        without = [[one for one in rest if one not in chunk] for chunk in chunks] if parts > 2 else []
        smaller = next((some for some in [*chunks, *without] if fails(some)), None)
        if smaller is not None:
            parts = 2 if smaller in chunks else parts - 1
            rest = smaller
            yield rest
        elif parts == len(rest):
            return
        else:
            parts = min(2 * parts, len(rest))
