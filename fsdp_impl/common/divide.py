"""How a sum of gradients becomes an average.

The average over ``n = shard_size * replicate_size`` ranks is taken by the collective where the reduce dtype has the
range for a plain sum, and by explicit divisions around a sum where it has not: fp16 overflows at 65504, so about
``sqrt(n)`` is divided out before the sum, which costs underflow, and the rest after it.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

_WIDE_RANGE = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Division:
    """Divide by ``before``, reduce with ``reduce_op`` and ``all_reduce_op``, divide by ``after``; 1 divides nothing."""

    before: float
    reduce_op: Any
    all_reduce_op: Any
    after: float


@functools.cache
def divide(
    dtype: torch.dtype,
    shard_size: int,
    replicate_size: int = 1,
    *,
    factor: float | None = None,
    force_sum: bool = False,
) -> Division:
    """Choose the division for gradients of ``dtype`` summed over ``shard_size * replicate_size`` ranks.

    Args:
        factor: divide by this instead of the number of ranks, over both collectives together.
        force_sum: sums only, for back ends whose fast path has nothing else.
    """
    world = shard_size * replicate_size
    divisor = world if factor is None else factor
    if dtype in _WIDE_RANGE:
        if divisor == world and world > 1 and not force_sum:
            return Division(before=1, reduce_op=ReduceOp.AVG, all_reduce_op=ReduceOp.AVG, after=1)
        # NCCL's AVG may go wrong over a single rank, and a sum of one is its average. Any other divisor is applied
        # after the sum: to the shard, which is smaller than the input, and on every back end alike.
        return Division(before=1, reduce_op=ReduceOp.SUM, all_reduce_op=ReduceOp.SUM, after=divisor)
    before = _near_square_root(divisor)
    return Division(before=before, reduce_op=ReduceOp.SUM, all_reduce_op=ReduceOp.SUM, after=divisor / before)


def scale(tensor: torch.Tensor, divisor: float) -> None:
    """Divide ``tensor`` in place, unless by 1."""
    if divisor != 1:
        tensor.div_(divisor)


def _near_square_root(world: float) -> int:
    """The smallest power of two that is at least ``sqrt(world)``, as far as doubling still divides ``world``."""
    factor = 1
    while world % factor == 0 and world / factor > factor:
        factor *= 2
    return factor
