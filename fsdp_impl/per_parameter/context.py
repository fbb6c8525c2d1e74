"""The state of the running iteration, which the units under one root share."""

from typing import TYPE_CHECKING

from fsdp_impl.common.streams import Event

if TYPE_CHECKING:
    from fsdp_impl.common.order import OrderCheck
    from fsdp_impl.per_parameter.group import ParamGroup
    from fsdp_impl.per_parameter.unit import Unit


class IterationContext:
    """The state of one forward and backward of the units under one root.

    Attributes:
        units: all units under the root, in the order of ``named_modules()``.
        forward_root: the unit whose forward is outermost just now. Not always the root: a part may run by itself.
        forward_order: groups in the order of their post-forwards since the last backward, with repeats.
        callback_queued: whether this backward's final callback is queued.
        is_last_backward: whether backward ends with waiting for reductions and clearing ``forward_order``.
        order: checks the order of gathers; ``None`` unless asked for.
        post_optim_event: what the next forward's gathers wait for instead of the current stream; used once.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.forward_root: Unit | None = None
        self.forward_order: list[ParamGroup] = []
        self.callback_queued = False
        self.is_last_backward = True
        self.post_optim_event: Event = None
        self.order: OrderCheck | None = None
