"""The norm of gradients that are spread over ranks.

For finite p, ``|g|_p = (sum over ranks of sum |g_i|^p)^(1/p)``; for ``p = inf`` the largest ``|g_i|``; for ``p = 0``
the number of non-zero ``g_i``. That is the norm of all gradients as one vector, without gathering any.

A rank's *share* of the norm is float64 of shape ``(2,)``. First comes ``sum |g_i|^p`` or ``max |g_i|``: powers of
large and small norms that leave the range of float32 stay in that of float64. Then, for ``p = inf`` only, 1 or 0 for
whether a NaN was seen: a maximum over ranks keeps or loses a NaN depending on who is compared with whom.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp_impl.common.private import foreach_norm


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
