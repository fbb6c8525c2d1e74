"""Where a unit stands in an iteration."""

from enum import Enum, auto


class Phase(Enum):
    """Where a unit or group stands in an iteration."""

    IDLE = auto()
    FORWARD = auto()  # from pre-forward to post-forward
    PRE_BACKWARD = auto()  # from the gradient of an output to the gradients of the inputs
    POST_BACKWARD = auto()  # from there to the end of backward
