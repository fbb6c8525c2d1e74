"""A failed comparison, where it failed, and the exception that reports it."""

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any

from shardproof.harness.judging.texts import ranks_of

# The points of a training step at which runs are compared.


@functools.total_ordering
class Stage(enum.Enum):
    """One point of a training step. Stages are ordered in the order in which they are checked.

    The value is the stage's name in messages and run files.
    """

    SHARDING = "sharding"
    """What each rank holds: the bytes once the model is sharded, and the elements of its shards."""

    RESUMPTION = "resumption"
    """What a training has when it is resumed from a checkpoint. Only ``check --save-and-resume`` has it."""

    INPUT = "input"
    """The tensors that a forward of the root gets. Only recordings have them."""

    INITIAL = "parameter before step"
    """The parameters before the optimizer step. Only recordings have them."""

    ROUTING = "routing"
    """What functions such as ``topk`` chose in forward. Only checks of the user's own training have it."""

    GATHERED = "gathered parameter"
    """A parameter as a module's forward finds it. Only ``--explain`` sees it."""

    BUFFER = "buffer"
    """A buffer as a module's forward finds it. Only ``--explain`` sees it."""

    MODULE_OUTPUT = "output of a module"
    """The tensors that a module's forward returned. Only ``--explain`` sees them."""

    OUTPUT = "output"
    """The tensors that forward returned."""

    LOSS = "loss"
    """The loss of one microbatch."""

    OUTPUT_GRADIENT = "gradient of a module's output"
    """The gradient of what a module's forward returned. Only ``--explain`` sees it."""

    OWN_GRADIENT = "gradient before its reduction"
    """The gradient of a parameter from one microbatch of one rank. Only ``--explain`` sees it."""

    GRADIENT = "gradient"
    """The gradients after the last backward."""

    TOTAL_NORM = "total norm"
    """The norm of all gradients, by which they are clipped."""

    CLIPPED_GRADIENT = "clipped gradient"
    """The gradients after clipping."""

    PARAMETER = "parameter after step"
    """The parameters after the optimizer step."""

    OPTIMIZER_STATE = "optimizer state"
    """The state of the optimizer after its step."""

    EXCEPTION = "exception"
    """An exception, and not a comparison: its phase is the call of the training that raised it."""

    COLLECTIVES = "collectives"
    """The collectives that were issued."""

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Stage):
            return NotImplemented
        return _POSITION[self] < _POSITION[other]


_POSITION = {stage: position for position, stage in enumerate(Stage)}


_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def step_label(step: int) -> str:
    """Name a step so that it cannot be taken for its neighbour: "the first step (step 0)"."""
    return f"the {_ORDINALS[step]} step (step {step})" if step < len(_ORDINALS) else f"step {step} (counted from 0)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Location:
    """Where two runs diverge. Everything but the stage may be unknown.

    Attributes:
        phase: for ``Stage.COLLECTIVES``, the phase of the step: "forward", "backward", "clip" or "step".
        step: the training step, counted from 0.
        rank: the global rank.
        name: the parameter's or the unit's name.
        element: the index into the full, unsharded tensor.
    """

    stage: Stage
    phase: str | None = None
    step: int | None = None
    rank: int | None = None
    name: str | None = None
    element: tuple[int, ...] | None = None

    @property
    def stage_label(self) -> str:
        """The stage's name, with the phase if there is one: "collectives in forward"."""
        return f"{self.stage.value} in {self.phase}" if self.phase else self.stage.value

    def as_record(self) -> dict[str, Any]:
        """Return the fields of the location in the run file."""
        return {
            "stage": self.stage_label, "step": self.step, "rank": self.rank, "name": self.name, "element": self.element,
        }  # fmt: skip

    def __str__(self) -> str:
        parts = [self.stage_label]
        parts += [f"of {self.name!r}"] if self.name else []
        parts += [f"in {step_label(self.step)}"] if self.step is not None else []
        parts += [f"on rank {self.rank}"] if self.rank is not None else []
        parts += [f"element {list(self.element)}"] if self.element else []
        return " ".join(parts)


@dataclasses.dataclass(frozen=True)
class Guess:
    """A guess at why a tensor is wrong. It never decides a verdict."""

    seen: str  # what holds for this rank's part of the tensor: "it is 2 times the oracle's everywhere"
    # A cause that lies in all ranks, such as a missing division. One rank alone cannot tell it from a fault of its own,
    # so it is given only if every rank has the same guess. Empty if there is none.
    cause: str = ""

    def render(self, *, is_shared: bool) -> str:
        """Return the clause for the text of the failure, with the cause if all ranks have the same guess."""
        return f"{self.seen}, as when {self.cause}" if self.cause and is_shared else self.seen


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The element in which two or three runs differ most."""

    offset: int  # the flat index of the element in the tensor of this rank
    values: dict[str, float]  # the element by the name of a run: "sharded", "baseline", "oracle"
    # The distance to the oracle by the name of a run, and under "allowed" what the sharded run may have; the distance
    # to the baseline where there is no oracle.
    ulps: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One comparison that failed on one rank: where its sides differ, and the numbers, in lines and by themselves."""

    location: Location
    text: str  # a predicate of the tensor at the location, such as "has shape ..."; further lines are indented by two
    guess: Guess | None = None
    numbers: Numbers | None = None

    def render(self, *, title: str, others: Sequence["Finding"] = (), size: int = 1) -> str:
        """Return the message of the failure: title and location, numbers, the guess, and what ``others`` found.

        ``others`` are findings at the same step and stage, of the ``size`` ranks that compared.
        """
        lines = [f"{title}: {self.location}", f"  {self.text}"]
        if self.guess is not None:
            causes = {other.guess.cause if other.guess else "" for other in others}
            lines.append(f"  {self.guess.render(is_shared=len(others) == size - 1 and causes <= {self.guess.cause})}")
        ranks = [other.location.rank for other in others if other.location.rank is not None]
        if ranks:
            lines.append(f"  {ranks_of(ranks)} {'diverge' if ranks[1:] else 'diverges'} at the same stage")
        elif size > 1 and self.location.rank is not None:
            lines.append(f"  rank {self.location.rank} alone: no other rank diverges at this stage")
        return "\n".join(lines)


class Divergence(AssertionError):
    """The sharded run differs from what it is compared with; all ranks of the world raise it together.

    Because all ranks raise it at the same place, no rank is left in a collective, and the world can run the next case.
    """

    def __init__(self, text: str, location: Location) -> None:
        super().__init__(text)
        self.location = location


def raise_first(findings: Sequence[Finding | None], *, title: str) -> None:
    """Raise the first of all ranks' findings, by step, stage and rank, as a :class:`Divergence`.

    Every rank must call it with the same findings, one for each rank. A finding about all ranks stands alone.
    """
    found = [finding for finding in findings if finding is not None]
    if found:
        first = min(found, key=_place)
        # A rank compares no further than its own first finding, which may be at a later step or stage.
        others = [one for one in found if one is not first and _place(one) == _place(first)]
        raise Divergence(first.render(title=title, others=others, size=len(findings)), first.location)


def _place(finding: Finding) -> tuple[int, Stage]:
    return finding.location.step or 0, finding.location.stage


class ProtocolError(TypeError):
    """An adapter departs from the protocol. Its text explains itself: a rank reports it without a traceback."""
