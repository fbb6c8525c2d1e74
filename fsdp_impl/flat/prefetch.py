"""Which unit to gather ahead of its use.

In backward it is the one whose forward came before: its gather is issued before (or, to save memory, after) this
unit's backward. In forward the host runs ahead of the device and gathers are queued early by themselves; where it does
not, ``forward_prefetch`` gathers the unit that came next in the first forward.
"""

from torch.profiler import record_function

from fsdp_impl.flat.context import IterationContext
from fsdp_impl.flat.group import FlatGroup


def record_first(group: FlatGroup, iteration: IterationContext) -> None:
    """Note ``group``'s first gather, once and for all."""
    if group not in iteration.first_order:
        iteration.first_order.append(group)


def record_forward(group: FlatGroup, iteration: IterationContext) -> None:
    """Note that ``group`` finished a forward; one that runs twice is noted twice, as backward will pass it twice."""
    group.forward_indices.append(len(iteration.forward_order))
    iteration.forward_order.append(group)


def prefetch_next(group: FlatGroup, iteration: IterationContext) -> None:
    """Issue the gather of the group that came after ``group`` in the first forward."""
    index = iteration.first_order.index(group) + 1
    if index < len(iteration.first_order):
        _prefetch(iteration.first_order[index])


def prefetch_previous(group: FlatGroup, iteration: IterationContext) -> None:
    """Issue the gather of the group that ran forward before ``group``, if backward still wants it."""
    index = group.forward_indices.pop() if group.forward_indices else 0
    if index and iteration.forward_order[index - 1].wanted_in_backward:
        _prefetch(iteration.forward_order[index - 1])


def _prefetch(target: FlatGroup) -> None:
    with record_function(f"FSDP::prefetch ({target.label})"):
        target.unshard()
