"""What is said of one step of a check: the tensors of the first stage that diverges, and what they look like."""

import dataclasses
import functools

from shardproof.harness.judging.finding import Location, Stage
from shardproof.harness.judging.observations import Measured
from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.tensors.layouts import part_of
from shardproof.harness.tensors.pieces import index_in_full
from shardproof.harness.watching.observation import Observed


@dataclasses.dataclass(frozen=True)
class Deviation:
    """A tensor that is too far from the oracle on a rank."""

    location: Location
    module: str
    text: str

    def on(self, rank: int) -> "Deviation":
        """Return the same of another rank, which has the same bits."""
        return dataclasses.replace(self, location=dataclasses.replace(self.location, rank=rank))


@dataclasses.dataclass
class StepOutcome:
    """What is said of one step.

    Attributes:
        found: the tensors of the first stage that diverges.
        lines: what the stage as a whole shows: a factor, a signature.
        signature: of the mistake that it looks like; empty if it looks like none.
        factor: the gradients of the run over the oracle's; None where they have no common one.
        loss_factor: the same of losses.
        measured: of each module and stage the distance that used most of what is allowed.
        notes: what was not judged, and why.
        shown: with capture on, the first tensor of a module that diverges.
    """

    step: int
    found: list[Deviation] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)
    signature: str = ""
    factor: float | None = None
    loss_factor: float | None = None
    compared: int = 0
    measured: dict[tuple[str, Stage], Measured] = dataclasses.field(default_factory=dict)
    notes: dict[str, int] = dataclasses.field(default_factory=dict)
    shown: Deviation | None = None

    def note(self, text: str) -> None:
        """Count one more tensor that was not judged for a reason."""
        self.notes[text] = self.notes.get(text, 0) + 1


def location_of(
    stage: Stage, event: Observed, step: int, rank: int, index: int = -1, *, name: str = "", box: Box | None = None
) -> Location:
    """Return where a tensor diverges, with the index in the full tensor of the ``index``-th element that a rank has."""
    box = box or (event.layout.box if event.layout is not None else None)
    element = None
    if box is not None and index >= 0 and box.shape:
        element = index_in_full(functools.partial(part_of, box=box), box.shape, index)
    return Location(stage=stage, step=step, rank=rank, name=name or event.parameter or None, element=element)
