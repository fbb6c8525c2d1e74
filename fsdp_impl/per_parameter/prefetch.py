"""Which group to gather ahead of its use.

Forward needs no prefetch of its own: the host runs ahead of the device, so the next group's gather is queued while this
group's compute runs. In backward the gather of the group that comes next, the one whose forward was the one before, is
issued before this group's compute, so that it does not queue behind this group's reduction.

A user may name the modules to gather instead.
"""

from collections.abc import Iterable, Sequence

from torch.profiler import record_function

from fsdp_impl.common.phase import Phase
from fsdp_impl.per_parameter.context import IterationContext
from fsdp_impl.per_parameter.group import ParamGroup


def record_forward(group: ParamGroup, iteration: IterationContext) -> None:
    """Note that ``group`` finished a forward that backward will pass; one that runs twice is noted twice."""
    group.forward_indices.append(len(iteration.forward_order))
    iteration.forward_order.append(group)


def prefetch_previous(group: ParamGroup, iteration: IterationContext) -> None:
    """Issue the gather of the group that ran forward before ``group``."""
    index = _pop_index(group)
    if index:
        prefetch([iteration.forward_order[index - 1]], Phase.PRE_BACKWARD)


def prefetch_chosen(group: ParamGroup | None, chosen: Sequence[ParamGroup]) -> None:
    """Issue the gathers of ``chosen`` instead, in backward."""
    if group is not None:
        _pop_index(group)
    prefetch(chosen, Phase.PRE_BACKWARD)


def prefetch(targets: Iterable[ParamGroup], phase: Phase) -> None:
    """Issue the gathers of ``targets``, in order, on the streams of ``phase``."""
    for target in targets:
        with record_function(f"FSDP::prefetch ({target.label})"), target.during(phase):
            target.unshard(async_op=target.options.unshard_async)


def _pop_index(group: ParamGroup) -> int | None:
    """``group``'s last place in the order of forwards; none if this is another backward through the same graph."""
    return group.forward_indices.pop() if group.forward_indices else None
