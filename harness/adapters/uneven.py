"""Where the rows of parameters lie that an implementation packs into buffers and cuts along dimension 0.

A rank holds consecutive rows of a parameter, in the order of the ranks, but how many follows from what else is in the
buffer. The ranks tell each other once, after sharding. That the rows make up the parameter is checked by the harness.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.harness.adapters.base import Cut, Piece


def cuts_of_rows(parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> dict[str, Cut]:
    """Return the cut of each parameter to the rows that this rank holds (collective).

    Args:
        parameters: DTensors with any number of rows on each rank.
        group: the ranks that divide the parameters.
    """
    # Names may differ between the ranks, and the order does not.
    mine = [_local(parameter).shape[0] for parameter in parameters.values()]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    first = [sum(rows) for rows in zip(*everyone[: group.rank()], strict=True)] or [0] * len(mine)
    return {
        name: functools.partial(_rows, first=start, count=count)
        for name, start, count in zip(parameters, first, mine, strict=True)
    }


def pieces_of_rows(tensors: Mapping[str, torch.Tensor | None], cuts: Mapping[str, Cut]) -> dict[str, Piece | None]:
    """Return what this rank holds of each tensor, cut as its parameter is; None where there is no tensor."""
    return {
        name: None if tensor is None else Piece(_local(tensor).detach(), cuts[name]) for name, tensor in tensors.items()
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rows(full: torch.Tensor, *, first: int, count: int) -> torch.Tensor:
    rows = full if full.ndim else full.view(1)
    return rows.narrow(0, min(first, rows.shape[0]), count)
