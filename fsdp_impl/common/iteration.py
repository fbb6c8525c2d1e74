"""Where the units under one root stand in an iteration, and whose forward came before whose: what prefetching needs."""

from collections.abc import Iterable
from enum import Enum, auto
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

from fsdp_impl.common.order import OrderCheck


class Phase(Enum):
    """Where a unit stands in an iteration."""

    IDLE = auto()
    FORWARD = auto()  # from pre-forward to post-forward
    PRE_BACKWARD = auto()  # from the gradient of an output to the gradients of the inputs
    POST_BACKWARD = auto()  # from there to the end of backward


class _HasGroup(Protocol):
    @property
    def group(self) -> Any: ...


UnitT = TypeVar("UnitT", bound=_HasGroup)
GroupT = TypeVar("GroupT")


class Iteration(Generic[UnitT, GroupT]):
    """What the units under one root share of the running forward and backward.

    Units hold it, so it refers to them and to their groups weakly (see Note: ownership).

    Attributes:
        order: checks the order of gathers; ``None`` unless that was chosen.
        callback_queued: whether this backward's final callback is queued.
    """

    def __init__(self, units: Iterable[UnitT] = (), order: OrderCheck | None = None) -> None:
        self._units = [ref(unit) for unit in units]
        self.order = order
        self.callback_queued = False
        self._forward_root: ref[UnitT] | None = None
        # Groups in the order of their post-forwards since the last backward, with repeats; of each group its places
        # there that backward has not passed; and how many stood there before the outermost forward of now.
        self._forwards: list[ref[GroupT]] = []
        self._places: WeakKeyDictionary[GroupT, list[int]] = WeakKeyDictionary()
        self._begun_at = 0

    @property
    def units(self) -> list[UnitT]:
        """The units under the root, in the order of ``modules()``."""
        return [unit for reference in self._units if (unit := reference()) is not None]

    @units.setter
    def units(self, units: Iterable[UnitT]) -> None:
        self._units = [ref(unit) for unit in units]

    @property
    def groups(self) -> list[GroupT]:
        """Those of :attr:`units`."""
        return [unit.group for unit in self.units if unit.group is not None]

    @property
    def forward_root(self) -> UnitT | None:
        """The unit whose forward is outermost just now. Not always the root: a part may run by itself."""
        return None if self._forward_root is None else self._forward_root()

    def begin_forward(self, unit: UnitT) -> None:
        """The outermost forward begins."""
        self._forward_root = ref(unit)
        self._begun_at = len(self._forwards)

    def end_forward(self) -> None:
        """The outermost forward has ended, or was given up."""
        self._forward_root = None

    def record_forward(self, group: GroupT) -> None:
        """Note that ``group`` finished a forward; one that runs twice is noted twice, as backward passes it twice."""
        self._places.setdefault(group, []).append(len(self._forwards))
        self._forwards.append(ref(group))

    def forget_latest_forwards(self) -> None:
        """No backward will pass those since the outermost forward began, which runs without autograd."""
        for reference in self._forwards[self._begun_at :]:
            if (group := reference()) is not None:
                self._places[group].pop()
        del self._forwards[self._begun_at :]

    def forget_forwards(self) -> None:
        """Backward has passed them, or none will."""
        self._forwards.clear()
        self._places.clear()
        self._begun_at = 0

    def pass_forward(self, group: GroupT) -> GroupT | None:
        """Backward passes ``group``'s latest forward; returns the group whose forward came before.

        ``None`` also if this is another backward through the same graph.
        """
        places = self._places.get(group)
        index = places.pop() if places else None
        return self._forwards[index - 1]() if index else None
