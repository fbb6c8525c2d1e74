"""Put other communication in place of a group's collectives."""

from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_impl.common import comms
from fsdp_impl.per_parameter.group import ParamGroup

# One more process group for each shard group, whatever the number of units on it: each is a communicator.
_reduce_groups: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()


def use_group_memory(group: ParamGroup, *, enable: bool) -> None:
    """See ``FSDPModule.set_allocate_memory_from_process_group_for_comm``."""
    _check_ours(group.options.all_gather, comms.GroupMemoryGather, "all-gather")
    _check_ours(group.options.reduce_scatter, comms.GroupMemoryReduce, "reduce-scatter")
    if group.mesh.group is None or group.reduce_group is None:
        return
    group.options.all_gather = comms.GroupMemoryGather(group.mesh.group) if enable else None
    group.options.reduce_scatter = comms.GroupMemoryReduce(group.reduce_group) if enable else None


def use_symmetric_memory(group: ParamGroup, backend: str) -> None:
    """See ``FSDPModule.set_symm_mem_for_comm``."""
    if backend != "NCCL" or group.device.type != "cuda":
        raise NotImplementedError(
            f"set_symm_mem_for_comm supports backend NCCL on cuda, not {backend} on {group.device.type}"
        )
    _check_ours(group.options.all_gather, comms.SymmetricGather, "all-gather")
    _check_ours(group.options.reduce_scatter, comms.SymmetricReduce, "reduce-scatter")
    if group.options.max_reduce_inputs > 1:
        raise ValueError(
            "set_reduce_scatter_max_input_buffers(>1) is not supported with the symmetric-memory reduce-scatter, but "
            f"got {group.options.max_reduce_inputs} for {group.label}"
        )
    if group.mesh.group is None or group.reduce_group is None:
        return
    group.options.all_gather = comms.SymmetricGather(group.mesh.group, backend)
    if group.options.force_sum:
        group.options.reduce_scatter = comms.SymmetricReduce(group.reduce_group, backend)


def separate_reduce_group(group: ParamGroup, *, enable: bool) -> None:
    """See ``FSDPModule.set_separate_reduce_scatter_group``."""
    shared = group.mesh.group
    if shared is None or not enable:
        group.reduce_group = shared
        return
    if shared not in _reduce_groups:
        # Ranks of other shard groups may not come here: only the members wait for each other.
        _reduce_groups[shared] = dist.new_group(
            dist.get_process_group_ranks(shared), use_local_synchronization=True, group_desc="fsdp_reduce_scatter"
        )
    group.reduce_group = _reduce_groups[shared]


def _check_ours(comm: object, kind: type, name: str) -> None:
    if comm is not None and not isinstance(comm, kind):
        raise AssertionError(f"cannot change where buffers live when the {name} is custom: {type(comm).__name__}")
