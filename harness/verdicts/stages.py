"""The points of a training step at which runs are compared."""

from __future__ import annotations

import enum
import functools


@functools.total_ordering
class Stage(enum.Enum):
    """One point of a training step. Stages are ordered in the order in which they are checked.

    The value is the stage's name in messages and run files.
    """

    SHARDING = "sharding"
    """What each rank holds: the bytes once the model is sharded, and the elements of its shards."""

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

    COLLECTIVES = "collectives"
    """The collectives that were issued."""

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Stage):
            return NotImplemented
        return _POSITION[self] < _POSITION[other]


_POSITION = {stage: position for position, stage in enumerate(Stage)}
