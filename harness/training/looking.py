"""The looks at all roots after their watched steps: what a rank sees of each, and the judgement of each."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from shardproof.harness.training.evidence import Evidence, Start
from shardproof.harness.training.examination import Examination
from shardproof.harness.training.findings import DoctorFinding, count_of
from shardproof.harness.training.later import Later
from shardproof.harness.watching.looks import Looks, Rounds
from shardproof.harness.watching.model import Model
from shardproof.harness.watching.records import StepRecord
from shardproof.harness.watching.successors import Successors

#: Looks that the last line lists by their steps.
_MOST_STEPS = 6


class LookedAt(NamedTuple):
    """A root whose steps were watched.

    Attributes:
        number: that of messages; 0 for the first root.
        model: as this rank has it.
        starts: what each rank is for it.
        holders: by parameter, the sets of ranks that hold the same elements.
        examination: of its watched steps.
    """

    number: int
    model: Model
    starts: Sequence[Start]
    holders: dict[str, list[tuple[int, ...]]]
    examination: Examination

    @property
    def can_be_looked_at(self) -> bool:
        """Whether its state can be read where an optimizer steps: not within a backward, nor from an engine's parts."""
        last = self.examination.seen[-1:]
        is_in_backward = any(own.are_consumed for one in last for own in one.gradients)
        return bool(last) and not is_in_backward and self.model.engine is None


class Looking(contextlib.AbstractContextManager["Looking"]):
    """Looks at roots after their watched steps, while it is entered.

    Args:
        roots: those that can be looked at, the first root first.
        only: the optimizers whose steps count; empty for each that steps.
        begin: the number of the first step that follows.
        finds_more: whether a model that replaces the root is looked at too.
        on_look: is called with what is seen of each root at a step; an exception of it ends the looks.
        on_destroy: is called before all process groups are destroyed.
        on_error: takes errors of ours.
        passes: exceptions of ``on_look`` that reach the training.
    """

    def __init__(
        self, roots: Sequence[LookedAt], only: Sequence[torch.optim.Optimizer], begin: int, *, finds_more: bool,
        on_look: Callable[[list[StepRecord]], None], on_destroy: Callable[[], None],
        on_error: Callable[[Exception], None], passes: tuple[type[Exception], ...],
    ) -> None:  # fmt: skip
        self._roots = roots
        self._judges = [Later(one.examination.seen, one.examination.findings, is_first=not one.number) for one in roots]
        may_succeed = finds_more and len(roots) == 1 and not only
        successors = Successors(roots[0].model) if may_succeed else None
        in_turn = all(len(record.optimizers) < 2 for one in roots[0].examination.seen for record in one.records)
        self._looks = Looks(
            [one.model for one in roots], Rounds(roots[0].model, only, in_turn=in_turn, successors=successors), begin,
            on_look=on_look, on_destroy=on_destroy, on_error=on_error, passes=passes,
        )  # fmt: skip
        self._steps: list[str] = []
        self._found: list[DoctorFinding] = []

    def __enter__(self) -> "Looking":
        self._looks.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._looks.__exit__(*details)

    @property
    def has_more(self) -> bool:
        """Whether there were steps since the last look."""
        return self._looks.has_more

    def look(self) -> list[StepRecord]:
        """Look now, after the last step."""
        return self._looks.look()

    def judge(
        self, every: Sequence[list[StepRecord]], ties: Callable[[Model], Sequence[tuple[str, ...]]], *, is_end: bool
    ) -> Iterator[tuple[int, list[DoctorFinding]]]:
        """Yield what is new of each root, with its number.

        Args:
            every: by root, what ranks see of it.
            ties: returns the names of parameters of a model that should be one.
            is_end: whether no step follows.
        """
        self._steps.append("the end" if is_end else f"step {every[0][0].step}")
        for root, judge, records in zip(self._roots, self._judges, every, strict=True):
            look = Evidence(records, root.starts, root.holders)
            new = root.examination.add(judge.judge(look, ties(root.model), is_end=is_end))
            self._found += new
            yield root.number, new

    def said(self) -> str:
        """Return the line that ends the looks; empty where there were none."""
        if not self._steps:
            return ""
        steps = self._steps if len(self._steps) <= _MOST_STEPS else [*self._steps[:2], "...", *self._steps[-2:]]
        errors, notes = (sum(one.is_note == is_note for one in self._found) for is_note in (False, True))
        new = ", ".join(filter(None, [
            count_of(errors, "further finding", "further findings") if errors or not notes else "",
            count_of(notes, "further note", "further notes") if notes else "",
        ]))  # fmt: skip
        return f"looked again at {', '.join(steps)}: {new if self._found else 'no further finding'}"
