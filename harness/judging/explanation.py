"""What one rank returns of a failed case that ran once more with capture on."""

import dataclasses
from collections.abc import Iterator, Sequence

from shardproof.harness.judging.finding import Guess, Location, Numbers, Stage, step_label
from shardproof.harness.judging.texts import ranks_of
from shardproof.runfile import FirstDivergence

#: The most names of other tensors that diverge at the same stage that a text lists.
_MOST_NAMES = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class DivergentTensor:
    """The first tensor in which a rank's runs diverge."""

    order: tuple[int, ...]  # the place of the comparison among all that the case makes; it is the same on all ranks
    title: str  # what was compared with what
    location: Location
    # The module whose forward or backward it is, or that owns the parameter; "(root)" is the root, and empty what
    # belongs to no module.
    module: str
    parameter: str  # the parameter or buffer; empty for the tensors of a module, and for losses and norms
    where: str  # the microbatch and the call of the module, where there are several
    text: str  # the values and their distances; may have several lines
    guess: Guess | None = None
    numbers: Numbers | None = None
    also: tuple[str, ...] = ()  # the names of all tensors that diverge at this stage of this step on this rank

    def as_record(self) -> FirstDivergence:
        """Return the place as the run file stores it."""
        numbers = {} if self.numbers is None else vars(self.numbers)
        place = self.location.as_record() | numbers
        return FirstDivergence(**place, module=self.module, parameter=self.parameter, where=self.where, also=self.also)

    def render(self, others: Sequence["DivergentTensor"], size: int) -> list[str]:
        """Return the lines that describe the place, with those of the other ranks, of ``size`` in all."""
        at = self.location
        alike = [one for one in others if _same_place(one, self)]
        lines = [
            f"module {self.module or 'none'}, parameter {self.parameter or 'none'}",
            ", ".join(self._place()),
            *(line.strip() for line in self.text.splitlines()),
            *self._guesses(alike, size),
            *self._other_names(),
            *self._other_ranks(others, alike, size),
            f"compared with {self.title}",
        ]
        return [
            f"first divergence: {at.stage.value}{f' of {at.name!r}' if at.name else ''}",
            *(f"  {line}" for line in lines),
        ]

    def _place(self) -> Iterator[str]:
        """Yield the step, the microbatch, the rank and the element, as far as they are known."""
        at = self.location
        if at.step is not None:
            yield step_label(at.step)
        if self.where:
            yield self.where
        if at.rank is not None:
            yield f"rank {at.rank}"
        if self.numbers is not None:
            yield f"offset {self.numbers.offset} in the rank's shard"
            if at.element is not None:
                yield f"element {list(at.element)}"

    def _guesses(self, alike: Sequence["DivergentTensor"], size: int) -> Iterator[str]:
        """Yield the guess, which may be shared by all ranks."""
        if self.guess is not None:
            is_shared = len(alike) == size - 1 and {one.guess for one in alike} <= {self.guess}
            yield self.guess.render(is_shared=is_shared)

    def _other_names(self) -> Iterator[str]:
        """Yield the other tensors that diverge at the stage."""
        if more := [name for name in self.also if name != self.location.name]:
            listed = ", ".join(map(repr, more[:_MOST_NAMES]))
            rest = f" and {len(more) - _MOST_NAMES} more" if len(more) > _MOST_NAMES else ""
            yield f"also diverging at this stage: {listed}{rest}"

    def _other_ranks(
        self, others: Sequence["DivergentTensor"], alike: Sequence["DivergentTensor"], size: int
    ) -> Iterator[str]:
        """Yield which other ranks diverge here, or, where none does, where they diverge."""
        rank = self.location.rank
        # A check tells all ranks of the first one's.
        ranks = [one.location.rank for one in alike if one.location.rank is not None]
        if ranks := [one for one in ranks if one != rank]:
            yield f"the same tensor diverges on {ranks_of(ranks)} too"
        elif not alike and size > 1 and rank is not None:
            yield f"no other rank diverges at this tensor first; {_elsewhere(others, size)}"


@dataclasses.dataclass
class Explanation:
    """What one rank saw of a case with capture on."""

    first: DivergentTensor | None = None  # the first tensor that diverges; None if all that was compared agrees
    compared: int = 0
    unseen: list[str] = dataclasses.field(default_factory=list)  # what could not be seen or compared, one line each
    stopped: str = ""  # what the last step that an error interrupted had reached; empty if none did
    # Lines of the collectives of one phase with the marks of what a case expects; empty if its counts are as expected,
    # or if it expects none.
    expected: list[str] = dataclasses.field(default_factory=list)
    # Which units lack a collective that the others have in the step that diverges.
    units: list[str] = dataclasses.field(default_factory=list)
    error: str = ""  # why there is no more; empty if nothing went wrong


def earliest(found: Sequence[DivergentTensor]) -> DivergentTensor | None:
    """Return the first of several ranks' first divergences, by the order of comparisons and then by rank."""
    return min(found, key=lambda one: (one.order, one.location.rank or 0), default=None)


def _same_place(one: DivergentTensor, other: DivergentTensor) -> bool:
    return (one.location.stage, one.location.step, one.location.name, one.where) == (
        other.location.stage, other.location.step, other.location.name, other.where,
    )  # fmt: skip


def _elsewhere(others: Sequence[DivergentTensor], size: int) -> str:
    if not others:
        return "the others agree everywhere"
    stages = sorted({one.location.stage for one in others}, key=list(Stage).index)
    return f"{len(others)} of {size - 1} diverge later, at: {', '.join(stage.value for stage in stages)}"
