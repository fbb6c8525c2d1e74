"""Clip gradients by their norm over all ranks."""

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Partial

from fsdp_impl.common.mesh import current_device
from fsdp_impl.common.private import foreach_mul_, foreach_norm

# The norm of gradients that are spread over ranks.
#
# For finite p, ``|g|_p = (sum over ranks of sum |g_i|^p)^(1/p)``; for ``p = inf`` the largest ``|g_i|``; for ``p = 0``
# the number of non-zero ``g_i``. That is the norm of all gradients as one vector, without gathering any.
#
# A rank's *share* of the norm is float64 of shape ``(2,)``. First comes ``sum |g_i|^p`` or ``max |g_i|``: powers of
# large and small norms that leave the range of float32 stay in that of float64. Then, for ``p = inf`` only, 1 or 0 for
# whether a NaN was seen: a maximum over ranks keeps or loses a NaN depending on who is compared with whom.


def local_share(tensors: Sequence[torch.Tensor], p: float, device: torch.device, *, foreach: bool) -> torch.Tensor:
    """This rank's share, on ``device``. Zeros without elements: torch has no infinite norm of an empty tensor."""
    tensors = [tensor for tensor in tensors if tensor.numel() > 0]
    if not tensors:
        return torch.zeros(2, dtype=torch.float64, device=device)
    norms = torch.stack([norm.to(device, torch.float64) for norm in _norms(tensors, p, foreach)])
    if math.isinf(p):
        largest = norms.max()
        return torch.stack([largest.nan_to_num(nan=0.0, posinf=math.inf), largest.isnan().double()])
    total = norms.sum() if p == 0 else norms.pow(p).sum()
    return torch.stack([total, torch.zeros_like(total)])


def reduce_norm(shares: torch.Tensor, group: dist.ProcessGroup, p: float) -> torch.Tensor:
    """Combine shares, stacked to ``(k, 2)``, over the ranks of ``group``: one all-reduce, in place."""
    dist.all_reduce(shares, op=dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM, group=group)
    return shares


def combine(shares: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """Combine the shares of different gradients into one."""
    stacked = torch.stack(list(shares))
    return stacked.amax(dim=0) if math.isinf(p) else stacked.sum(dim=0)


def finish(share: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    """The norm, 0-dim and of ``dtype``, from a share that is complete."""
    value, has_nan = share.unbind()
    if math.isinf(p):
        value = torch.where(has_nan > 0, math.nan, value)
    elif p != 0:
        value = value.pow(1.0 / p)
    return value.to(dtype)


def _norms(tensors: Sequence[torch.Tensor], p: float, foreach: bool) -> Sequence[torch.Tensor]:
    # Half precision is summed in float32: float16 ends at norms that training does reach.
    wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
    if foreach and len(set(wide)) == 1 and len({tensor.device for tensor in tensors}) == 1:
        norms: Sequence[torch.Tensor] = foreach_norm(list(tensors), ord=p, dtype=wide[0])
        return norms
    return [torch.linalg.vector_norm(tensor, p, dtype=dtype) for tensor, dtype in zip(tensors, wide, strict=True)]


# The ranks that a gradient is spread over: one process group for each sharded dimension of its mesh.
Groups: TypeAlias = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place by ``min(1, max_norm / (total_norm + 1e-6))``.

    Gradients may be DTensors on any meshes, plain tensors (taken to be equal on all ranks), or both. Every rank must
    call this with the same parameters. One all-reduce is issued for each mesh dimension that any gradient is sharded
    on, also where a rank's own shards are all empty; none without sharded gradients.

    Args:
        parameters: one tensor or several; those without ``grad`` are skipped.
        max_norm: the largest norm to leave alone.
        norm_type: p of the p-norm, at least 0; may be ``inf`` or ``"inf"``.
        error_if_nonfinite: raise instead of scaling by a norm that is infinite or NaN.
        foreach: use the multi-tensor kernels; ``None`` and ``True`` do where the tensors allow it.

    Returns:
        The norm before clipping: a plain 0-dim tensor, the same on every rank, of the gradients' dtype but at least
        float32. Plain, because a norm is a number to log and compare, and on a rank that holds no element of the
        sharded gradients there is nothing that a DTensor of it could be made from.

    Raises:
        ValueError: if ``norm_type`` is negative or NaN, or a gradient is a pending sum (a ``Partial`` placement).
        RuntimeError: with ``error_if_nonfinite``, if the norm is infinite or NaN.
    """
    p = float(norm_type)
    if not p >= 0:
        raise ValueError(f"norm_type should be at least 0, not {norm_type}")
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    use_foreach = foreach is not False
    by_groups: dict[Groups, list[torch.Tensor]] = {}
    for grad in grads:
        by_groups.setdefault(sharding_groups(grad), []).append(grad)
    shares = {
        groups: local_share([_local(g) for g in members], p, _compute_device(members[0]), foreach=use_foreach)
        for groups, members in by_groups.items()
    }
    dtype = reduce(torch.promote_types, (grad.dtype for grad in grads), torch.float32)
    total_norm = finish(combine_over_ranks(shares, p), p, dtype)
    if error_if_nonfinite and not math.isfinite(total_norm.item()):
        raise RuntimeError(
            f"The total norm of order {p} for gradients from `parameters` is non-finite ({total_norm.item()}), so it "
            "cannot be clipped. To scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    scale_to([_local(grad) for grad in grads], float(max_norm), total_norm, foreach=use_foreach)
    return total_norm


def combine_over_ranks(shares: dict[Groups, torch.Tensor], p: float) -> torch.Tensor:
    """Complete shares of the norm (see :mod:`fsdp_impl.common.clip`), given by the ranks that each is spread over.

    One all-reduce for each process group in ``shares``: every rank must have the same keys.
    """
    # Later dimensions of a mesh first: they are the fast ones (tensor parallel, within a host).
    while pending := [groups for groups in shares if groups]:
        group = max(pending, key=len)[-1]
        shares = _reduce_over(group, shares, p)
    return shares[()]


def scale_to(tensors: Sequence[torch.Tensor], max_norm: float, total_norm: torch.Tensor, *, foreach: bool) -> None:
    """Scale plain ``tensors`` in place by ``min(1, max_norm / (total_norm + 1e-6))``."""
    # Clamping instead of asking whether to clip: the question would make the host wait for the device.
    coefficient = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, _), members in by_kind.items():
        factor = coefficient.to(device)
        if foreach:
            foreach_mul_(members, factor)
        else:
            for member in members:
                member.mul_(factor)


def _reduce_over(group: dist.ProcessGroup, shares: dict[Groups, torch.Tensor], p: float) -> dict[Groups, torch.Tensor]:
    """Complete over ``group`` every share that is spread over it, all in one all-reduce."""
    spread = [groups for groups in shares if group in groups]
    reduced = reduce_norm(torch.stack([shares[groups] for groups in spread]), group, p)
    merged: dict[Groups, list[torch.Tensor]] = {}
    for groups, share in shares.items():
        if group not in groups:
            merged.setdefault(groups, []).append(share.to(reduced.device))
    for groups, share in zip(spread, reduced.unbind(), strict=True):
        merged.setdefault(tuple(other for other in groups if other is not group), []).append(share)
    return {groups: combine(members, p) for groups, members in merged.items()}


def sharding_groups(grad: torch.Tensor) -> Groups:
    """The ranks that ``grad`` is spread over; a ``ValueError`` if it is a pending sum."""
    if not isinstance(grad, DTensor):
        return ()
    groups = []
    for dim, placement in enumerate(grad.placements):
        if isinstance(placement, Partial):
            raise ValueError(f"the norm of a gradient that is a pending sum is not defined: {grad.placements}")
        if not isinstance(placement, Replicate) and grad.device_mesh.size(dim) > 1:
            groups.append(grad.device_mesh.get_group(dim))
    return tuple(groups)


def _compute_device(grad: torch.Tensor) -> torch.device:
    """Where a collective over the gradient's ranks runs, which for offloaded gradients is not where they live."""
    if not isinstance(grad, DTensor) or grad.device_mesh.device_type == grad.device.type:
        return grad.device
    return current_device(grad.device_mesh.device_type)


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
