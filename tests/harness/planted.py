"""Adapters of a reference with one bug planted at a seam; each lives in ranks of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from fsdp_impl.common import collectives, divide, norm
from harness.adapters.reference import ReferenceAdapter

DROPPED_UNIT = "layers.1"
GATHERED_TWICE = "layers.2"


class _Planted(ReferenceAdapter):
    """Replaces a seam before the first model of the process is sharded, for good."""

    traits = dataclasses.replace(ReferenceAdapter.traits, isolation="adapter")
    module_: Any
    seam: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if getattr(self.module_, self.seam) is not type(self).wrong:
            setattr(self.module_, self.seam, type(self).wrong)
        super().__init__(*args, **kwargs)


class ForgottenDivision(_Planted):
    """Gradients are summed and never divided."""

    name = "forgotten-division"
    module_, seam = divide, "divide"

    @staticmethod
    def wrong(dtype: torch.dtype, shard_size: int, replicate_size: int = 1) -> divide.Division:
        return divide.Division(before=1, reduce_op=dist.ReduceOp.SUM, all_reduce_op=dist.ReduceOp.SUM, after=1)


_reduce, _gather = collectives.reduce, collectives.gather


class DroppedReduction(_Planted):
    """One unit's gradients are divided and never summed: each rank keeps its own part of its own."""

    name = "dropped-reduction"
    module_, seam = collectives, "reduce"

    @staticmethod
    def wrong(output: torch.Tensor, contributions: torch.Tensor, group: Any, op: Any, *, unit: str) -> None:
        if unit != DROPPED_UNIT:
            return _reduce(output, contributions, group, op, unit=unit)
        output.copy_(contributions.view(group.size(), -1)[group.rank()])


class AverageIsSum(_Planted):
    """The backend's average is a sum."""

    name = "average-is-sum"
    module_, seam = collectives, "reduce"

    @staticmethod
    def wrong(output: torch.Tensor, contributions: torch.Tensor, group: Any, op: Any, *, unit: str) -> None:
        _reduce(output, contributions, group, dist.ReduceOp.SUM, unit=unit)


class LocalNorm(_Planted):
    """The norm's reduction over the ranks is skipped."""

    name = "local-norm"
    module_, seam = norm, "reduce_norm"

    @staticmethod
    def wrong(shares: torch.Tensor, group: Any, p: float) -> torch.Tensor:
        return shares


class SecondGather(_Planted):
    """One unit is gathered twice each time."""

    name = "second-gather"
    module_, seam = collectives, "gather"

    @staticmethod
    def wrong(output: torch.Tensor, shard: torch.Tensor, group: Any, *, unit: str, async_op: bool = False) -> Any:
        if unit == GATHERED_TWICE:
            _gather(output, shard, group, unit=unit)
        return _gather(output, shard, group, unit=unit, async_op=async_op)
