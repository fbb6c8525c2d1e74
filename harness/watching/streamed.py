"""Rows of an IterableDataset as a loader gives them, which have no numbers: what stands for each, on the host."""

import zlib
from typing import Any

import torch

from shardproof.harness.watching.names import readable_of

#: How many elements of a row stand for it.
_ELEMENTS = 512

#: The fewest elements of a row of integers, and of other numbers, that are no chance.
_FEWEST_INTEGERS, _FEWEST_NUMBERS = 8, 2


def rows_given(batch: Any) -> list[int]:
    """Return what stands for each row of a batch on the host; nothing of other ones.

    Rows of one value, such as of padding alone, are left out. The tensor of the batch with the longest rows counts.
    """
    found = [one for one in readable_of(batch) if type(one) is torch.Tensor and one.device.type == "cpu" and one.ndim]
    found = [one for one in found if one.layout is torch.strided and one.numel() >= one.size(0) * _fewest(one)]
    if not found:
        return []
    rows = max(found, key=lambda one: one.numel() // max(1, one.size(0))).detach()
    rows = rows.reshape(rows.size(0), -1)
    part = rows[:, :: max(1, rows.size(1) // _ELEMENTS)].contiguous()
    varies = (part != part[:, :1]).any(1).tolist()
    raw = part.view(torch.uint8).numpy()
    return [zlib.crc32(row.tobytes()) for row, is_kept in zip(raw, varies, strict=True) if is_kept]


def _fewest(tensor: torch.Tensor) -> int:
    return _FEWEST_NUMBERS if tensor.is_floating_point() or tensor.is_complex() else _FEWEST_INTEGERS
