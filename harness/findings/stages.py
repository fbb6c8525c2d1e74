"""The points of a training step at which runs are compared."""

from __future__ import annotations

import enum
import functools


@functools.total_ordering
class Stage(enum.Enum):
    """One point of a training step; stages compare in the order in which they happen.

    The value is the stage's name in messages and run files.
    """

    SHARDING = "sharding"
    OUTPUT = "output"
    LOSS = "loss"
    GRADIENT = "gradient"
    TOTAL_NORM = "total norm"
    CLIPPED_GRADIENT = "clipped gradient"
    PARAMETER = "parameter after step"
    COLLECTIVES = "collectives"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Stage):
            return NotImplemented
        return _POSITION[self] < _POSITION[other]


_POSITION = {stage: position for position, stage in enumerate(Stage)}
