"""Where the units under one root stand in an iteration."""

from collections.abc import Iterable
from enum import Enum, auto
from typing import Generic, TypeVar
from weakref import ref

from fsdp_impl.common.order import OrderCheck

UnitT = TypeVar("UnitT")


class Phase(Enum):
    """Where a unit or group stands in an iteration."""

    IDLE = auto()
    FORWARD = auto()  # from pre-forward to post-forward
    PRE_BACKWARD = auto()  # from the gradient of an output to the gradients of the inputs
    POST_BACKWARD = auto()  # from there to the end of backward


class Iteration(Generic[UnitT]):
    """What the units under one root share of the running forward and backward.

    Units hold it, so it refers to them weakly (see Note: ownership).

    Attributes:
        callback_queued: whether this backward's final callback is queued.
        order: checks the order of gathers; ``None`` unless that was chosen.
    """

    def __init__(self) -> None:
        self._units: list[ref[UnitT]] = []
        self._forward_root: ref[UnitT] | None = None
        self.callback_queued = False
        self.order: OrderCheck | None = None

    @property
    def units(self) -> list[UnitT]:
        """The units under the root, in the order of ``modules()``."""
        return [unit for reference in self._units if (unit := reference()) is not None]

    @units.setter
    def units(self, units: Iterable[UnitT]) -> None:
        self._units = [ref(unit) for unit in units]

    @property
    def forward_root(self) -> UnitT | None:
        """The unit whose forward is outermost just now. Not always the root: a part may run by itself."""
        return None if self._forward_root is None else self._forward_root()

    @forward_root.setter
    def forward_root(self, unit: UnitT | None) -> None:
        self._forward_root = None if unit is None else ref(unit)
