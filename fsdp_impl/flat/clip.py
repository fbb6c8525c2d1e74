"""The norm of all gradients under one root, and scaling by it."""

import warnings
from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Replicate

from fsdp_impl.common import norm
from fsdp_impl.common.clip import Groups, combine_over_ranks, scale_to, sharding_groups
from fsdp_impl.flat.group import FlatGroup

if TYPE_CHECKING:
    from fsdp_impl.flat.module import FullyShardedDataParallel


@torch.no_grad()
def clip_grad_norm(root: "FullyShardedDataParallel", max_norm: float, p: float) -> torch.Tensor:
    """See ``FullyShardedDataParallel.clip_grad_norm_``. Gradients that no unit manages count as equal on all ranks."""
    if not p >= 0:
        raise ValueError(f"norm_type should be at least 0, not {p}")
    by_groups: dict[Groups, list[torch.Tensor]] = {(): []}
    grads: list[torch.Tensor] = []
    for group in root._unit.groups():
        grads += [holder.param.grad for holder in group.shards.holders() if holder.param.grad is not None]
        for groups, part in _parts(group):
            # Every rank makes the same entries, also for what it has no part of: each entry means collectives.
            members = by_groups.setdefault(groups, [])
            if part is not None:
                members.append(part)
    managed = {param for group in root._unit.groups() for param in (group.shards.flat, *group.shards.originals)}
    for param in root.parameters():
        if param not in managed and param.grad is not None:
            by_groups.setdefault(sharding_groups(param.grad), []).append(param.grad)
            grads.append(param.grad)
    device = root.compute_device
    shares = {groups: norm.local_share(members, p, device, foreach=True) for groups, members in by_groups.items()}
    # Half precision is scaled by a factor of float32, float64 by one of its own.
    wide = reduce(torch.promote_types, [grad.dtype for grad in grads], torch.float32)
    total = norm.finish(combine_over_ranks(shares, p), p, wide)
    scale_to(grads, max_norm, total, foreach=True)
    if not grads:
        # Another rank's gradients may have another dtype; asking would cost a collective at each step.
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {root.rank} with no gradients -- returning the total norm in the "
            f"default dtype {total.dtype}",
            stacklevel=4,
        )
        return total
    return total.to(reduce(torch.promote_types, [grad.dtype for grad in grads]))


def _parts(group: FlatGroup) -> Iterator[tuple[Groups, torch.Tensor | None]]:
    """This rank's parts of the gradients, by the ranks that they are spread over; ``None`` where it has none."""
    shards = group.shards
    data_parallel = () if group.ranks.shard_group is None else (group.ranks.shard_group,)
    if not any(shards.specs):
        for holder in shards.holders():
            yield data_parallel, holder.param.grad
        yield data_parallel, None
        return
    for index, (spec, span) in enumerate(zip(shards.specs, shards.spans, strict=True)):
        beside: Groups = ()
        if spec is not None:
            beside = tuple(
                spec.mesh.get_group(dim)
                for dim, placement in enumerate(spec.placements)
                if not isinstance(placement, Replicate)
            )
        if shards.use_orig:
            part = shards.originals[index].grad if span.numel else None
        else:
            grad = shards.flat.grad
            part = grad[span.offset : span.offset + span.numel] if grad is not None else None
        yield (*data_parallel, *beside), part
