"""Where the units under one root stand in an iteration, and whose forward came before whose: what prefetching needs."""

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

from torch import nn

from fsdp_impl.common.order import OrderCheck

# Note: transitions
#
# Where a unit stands in an iteration is its phase; where the units under one root stand between the first backward of
# an iteration and its end is a state of the iteration. Both change by events, each by a table that has every change
# there is: (state, event) -> state. An event for which the table has no row is a mistake of ours, or of a call that
# should have been refused, and raises. A test trains until every row has been taken.
#
# Events of a unit, for `PHASES`:
# - A recomputation in backward is no forward, if backward has reached the unit or passed it: nothing begins or ends.
#   Before that it is one, and checkpointing may stop it in its midst.
# - A backward that a forward runs on its way neither passes nor ends the units whose forward goes on.
# - A forward that begins in a forward is that of another of the unit's modules, and there is one end; or of a module
#   that calls itself, and there are two.
# Flat units have the same phases and no table: there each event leads to one phase, wherever the unit stood. They do
# follow the other table, without what user code finalizes.


class Phase(Enum):
    """Where a unit stands in an iteration."""

    IDLE = auto()
    FORWARD = auto()  # from pre-forward to post-forward
    PRE_BACKWARD = auto()  # from the gradient of an output to the gradients of the inputs
    POST_BACKWARD = auto()  # from there to the end of backward


class UnitEvent(Enum):
    """An event that may change the phase of a unit (see Note: transitions)."""

    FORWARD_BEGINS = auto()
    FORWARD_ENDS = auto()  # of the last of its modules
    BACKWARD_REACHES = auto()  # the gradient of one of its outputs is known
    BACKWARD_PASSES = auto()  # its gradients are taken
    BACKWARD_ENDS = auto()  # by itself or by hand
    GIVEN_UP = auto()  # a forward or backward that raised, by a reset or another forward


PHASES: Mapping[tuple[Phase, UnitEvent], Phase] = {
    (Phase.IDLE, UnitEvent.FORWARD_BEGINS): Phase.FORWARD,
    (Phase.FORWARD, UnitEvent.FORWARD_BEGINS): Phase.FORWARD,  # of another of its modules, or within itself
    (Phase.FORWARD, UnitEvent.FORWARD_ENDS): Phase.IDLE,
    (Phase.IDLE, UnitEvent.FORWARD_ENDS): Phase.IDLE,  # around one within itself
    (Phase.IDLE, UnitEvent.BACKWARD_REACHES): Phase.PRE_BACKWARD,
    (Phase.FORWARD, UnitEvent.BACKWARD_REACHES): Phase.PRE_BACKWARD,  # from its first module, before its last has run
    (Phase.PRE_BACKWARD, UnitEvent.BACKWARD_REACHES): Phase.PRE_BACKWARD,  # another output
    (Phase.POST_BACKWARD, UnitEvent.BACKWARD_REACHES): Phase.PRE_BACKWARD,  # another of its forwards
    (Phase.PRE_BACKWARD, UnitEvent.BACKWARD_PASSES): Phase.POST_BACKWARD,
    (Phase.IDLE, UnitEvent.BACKWARD_PASSES): Phase.POST_BACKWARD,  # the end of backward, which did not reach it
    (Phase.FORWARD, UnitEvent.BACKWARD_PASSES): Phase.POST_BACKWARD,  # a recomputation that was stopped early
    (Phase.POST_BACKWARD, UnitEvent.BACKWARD_PASSES): Phase.POST_BACKWARD,  # that of a recomputation, by itself
    (Phase.POST_BACKWARD, UnitEvent.BACKWARD_ENDS): Phase.IDLE,
    # Without parameters, or to be finalized by hand, a unit need not have been passed.
    (Phase.IDLE, UnitEvent.BACKWARD_ENDS): Phase.IDLE,
    (Phase.FORWARD, UnitEvent.BACKWARD_ENDS): Phase.IDLE,
    (Phase.PRE_BACKWARD, UnitEvent.BACKWARD_ENDS): Phase.IDLE,
    (Phase.IDLE, UnitEvent.GIVEN_UP): Phase.IDLE,
    (Phase.FORWARD, UnitEvent.GIVEN_UP): Phase.IDLE,
    (Phase.PRE_BACKWARD, UnitEvent.GIVEN_UP): Phase.IDLE,
    (Phase.POST_BACKWARD, UnitEvent.GIVEN_UP): Phase.IDLE,
}


class Backward(Enum):
    """Where an iteration stands between its first backward and its end."""

    NONE = auto()  # no backward has begun
    RUNNING = auto()
    MORE = auto()  # one has ended, and was not to be the last
    RUNNING_BY_HAND = auto()  # one that user code is to finalize
    OPEN = auto()  # such a one has ended
    REDUCING = auto()  # finalized: reductions are issued and not waited for
    RUNNING_REDUCING = auto()  # meanwhile another backward runs, of a forward before that

    @property
    def is_running(self) -> bool:
        """Whether a backward runs, whose final callback is queued; or it has raised."""
        return self in (Backward.RUNNING, Backward.RUNNING_BY_HAND, Backward.RUNNING_REDUCING)

    @property
    def is_reducing(self) -> bool:
        """Whether user code has to wait for what it finalized."""
        return self in (Backward.REDUCING, Backward.RUNNING_REDUCING)


class BackwardEvent(Enum):
    """An event that changes where an iteration stands (see Note: transitions)."""

    BEGINS = auto()
    BEGINS_BY_HAND = auto()
    ENDS = auto()  # the backward, and not the iteration
    ENDS_ITERATION = auto()
    FINALIZED = auto()
    WAITED = auto()
    RESET = auto()


BACKWARDS: Mapping[tuple[Backward, BackwardEvent], Backward] = {
    (Backward.NONE, BackwardEvent.BEGINS): Backward.RUNNING,
    (Backward.MORE, BackwardEvent.BEGINS): Backward.RUNNING,
    (Backward.RUNNING, BackwardEvent.ENDS): Backward.MORE,
    (Backward.RUNNING, BackwardEvent.ENDS_ITERATION): Backward.NONE,
    (Backward.NONE, BackwardEvent.BEGINS_BY_HAND): Backward.RUNNING_BY_HAND,
    (Backward.OPEN, BackwardEvent.BEGINS_BY_HAND): Backward.RUNNING_BY_HAND,
    (Backward.RUNNING_BY_HAND, BackwardEvent.ENDS): Backward.OPEN,
    (Backward.OPEN, BackwardEvent.FINALIZED): Backward.REDUCING,
    (Backward.NONE, BackwardEvent.FINALIZED): Backward.REDUCING,  # though there may be nothing to reduce
    (Backward.REDUCING, BackwardEvent.WAITED): Backward.NONE,
    (Backward.REDUCING, BackwardEvent.BEGINS_BY_HAND): Backward.RUNNING_REDUCING,
    (Backward.RUNNING_REDUCING, BackwardEvent.ENDS): Backward.REDUCING,
    (Backward.RUNNING_REDUCING, BackwardEvent.WAITED): Backward.RUNNING_BY_HAND,  # in a hook
    (Backward.NONE, BackwardEvent.RESET): Backward.NONE,
    (Backward.RUNNING, BackwardEvent.RESET): Backward.NONE,
    (Backward.MORE, BackwardEvent.RESET): Backward.NONE,
    (Backward.RUNNING_BY_HAND, BackwardEvent.RESET): Backward.NONE,
    (Backward.OPEN, BackwardEvent.RESET): Backward.NONE,
    (Backward.REDUCING, BackwardEvent.RESET): Backward.NONE,
    (Backward.RUNNING_REDUCING, BackwardEvent.RESET): Backward.NONE,
}

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


def after(table: Mapping[tuple[StateT, EventT], StateT], state: StateT, event: EventT) -> StateT:
    """The state in which ``event`` puts what stands in ``state``, by ``table`` (see Note: transitions)."""
    following = table.get((state, event))
    assert following is not None, f"{event.name} in the state {state.name}"
    return following


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
        backward: where the iteration stands between its first backward and its end.
    """

    def __init__(self, units: Iterable[UnitT] = (), order: OrderCheck | None = None) -> None:
        self._units = [ref(unit) for unit in units]
        self.order = order
        self.backward = Backward.NONE
        self._forward_root: ref[UnitT] | None = None
        self._outermost: ref[nn.Module] | None = None
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

    def is_outermost(self, unit: UnitT, module: nn.Module) -> bool:
        """Whether the outermost forward is that of ``module``, one of ``unit``."""
        return self.forward_root is unit and self._outermost == ref(module)

    def begin_forward(self, unit: UnitT, module: nn.Module) -> None:
        """The outermost forward begins, that of ``module``, one of ``unit``."""
        self._forward_root, self._outermost = ref(unit), ref(module)
        self._begun_at = len(self._forwards)

    def end_forward(self) -> None:
        """The outermost forward has ended, or was given up."""
        self._forward_root = self._outermost = None

    def on(self, event: BackwardEvent) -> None:
        """Follow ``event`` of a backward."""
        self.backward = after(BACKWARDS, self.backward, event)

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
