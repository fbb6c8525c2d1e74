"""Adapters of the reference with a bug that ends or stops a rank, for the cases that draw what they train."""

from __future__ import annotations

import os
from typing import Any

import torch

from fsdp_impl.common import norm
from tests.harness.planted import _Planted

_local_share, _reduce_norm = norm.local_share, norm.reduce_norm


class NormCrashes(_Planted):
    """Ranks that clip by another norm than the 2-norm die."""

    name = "norm-crashes"
    module_, seam = norm, "local_share"

    @staticmethod
    def wrong(tensors: Any, p: float, device: torch.device, *, foreach: bool) -> torch.Tensor:
        if p != 2:
            os.abort()
        return _local_share(tensors, p, device, foreach=foreach)


class NormHangs(_Planted):
    """The first rank does not take part in the reduction of another norm than the 2-norm."""

    name = "norm-hangs"
    module_, seam = norm, "reduce_norm"

    @staticmethod
    def wrong(shares: torch.Tensor, group: Any, p: float) -> torch.Tensor:
        return shares if p != 2 and group.rank() == 0 else _reduce_norm(shares, group, p)
