"""Clip gradients by their norm over all ranks."""

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Partial

from fsdp_impl.common import norm
from fsdp_impl.common.mesh import device_of
from fsdp_impl.common.private import foreach_mul_

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
        groups: norm.local_share([_local(g) for g in members], p, _compute_device(members[0]), foreach=use_foreach)
        for groups, members in by_groups.items()
    }
    dtype = reduce(torch.promote_types, (grad.dtype for grad in grads), torch.float32)
    total_norm = norm.finish(combine_over_ranks(shares, p), p, dtype)
    if error_if_nonfinite and not math.isfinite(total_norm.item()):
        raise RuntimeError(
            f"The total norm of order {p} for gradients from `parameters` is non-finite ({total_norm.item()}), so it "
            "cannot be clipped. To scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    scale_to([_local(grad) for grad in grads], float(max_norm), total_norm, foreach=use_foreach)
    return total_norm


def combine_over_ranks(shares: dict[Groups, torch.Tensor], p: float) -> torch.Tensor:
    """Complete shares of the norm (see :mod:`fsdp_impl.common.norm`), given by the ranks that each is spread over.

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
    _scale(tensors, coefficient, foreach)


def _reduce_over(group: dist.ProcessGroup, shares: dict[Groups, torch.Tensor], p: float) -> dict[Groups, torch.Tensor]:
    """Complete over ``group`` every share that is spread over it, all in one all-reduce."""
    spread = [groups for groups in shares if group in groups]
    reduced = norm.reduce_norm(torch.stack([shares[groups] for groups in spread]), group, p)
    merged: dict[Groups, list[torch.Tensor]] = {}
    for groups, share in shares.items():
        if group not in groups:
            merged.setdefault(groups, []).append(share.to(reduced.device))
    for groups, share in zip(spread, reduced.unbind(), strict=True):
        merged.setdefault(tuple(other for other in groups if other is not group), []).append(share)
    return {groups: norm.combine(members, p) for groups, members in merged.items()}


def sharding_groups(grad: torch.Tensor) -> Groups:
    """The ranks that ``grad`` is spread over.

    Raises:
        ValueError: if it is a pending sum.
    """
    if not isinstance(grad, DTensor):
        return ()
    groups = []
    for dim, placement in enumerate(grad.placements):
        if isinstance(placement, Partial):
            raise ValueError(f"the norm of a gradient that is a pending sum is not defined: {grad.placements}")
        if not isinstance(placement, Replicate):
            groups.append(grad.device_mesh.get_group(dim))
    return tuple(groups)


def _compute_device(grad: torch.Tensor) -> torch.device:
    """Where a collective over the gradient's ranks runs, which for offloaded gradients is not where they live."""
    if not isinstance(grad, DTensor) or grad.device_mesh.device_type == grad.device.type:
        return grad.device
    return device_of(grad.device_mesh)


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _scale(tensors: Sequence[torch.Tensor], coefficient: torch.Tensor, foreach: bool) -> None:
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
