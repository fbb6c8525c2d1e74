"""Which group to gather ahead of its use.

Forward needs no prefetch of its own: the host runs ahead of the device, so the next group's gather is queued while this
group's compute runs. In backward the gather of the group that comes next, the one whose forward was the one before, is
issued before this group's compute, so that it does not queue behind this group's reduction.
"""

from torch.profiler import record_function

from fsdp_impl.per_parameter.context import IterationContext
from fsdp_impl.per_parameter.group import ParamGroup, Phase


def record_forward(group: ParamGroup, iteration: IterationContext) -> None:
    """Note that ``group`` finished a forward; one that runs twice is noted twice, as backward will pass it twice."""
    group.forward_indices.append(len(iteration.forward_order))
    iteration.forward_order.append(group)


def prefetch_previous(group: ParamGroup, iteration: IterationContext) -> None:
    """Issue the gather of the group that ran forward before ``group``."""
    if not group.forward_indices:
        return  # cleared, if this is another backward through the same graph
    index = group.forward_indices.pop()
    if index > 0:
        target = iteration.forward_order[index - 1]
        with record_function(f"FSDP::prefetch ({target.label})"), target.during(Phase.PRE_BACKWARD):
            target.unshard()
