"""Buffers are not sharded; they are cast once and stay so."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fsdp_impl.flat.unit import FlatUnit


def cast_buffers(units: list["FlatUnit"]) -> None:
    """Cast floating-point buffers to what the innermost unit around them says, and move all to where it computes."""
    seen: set[torch.Tensor] = set()
    for unit in reversed(units):  # inner units come later in the order of modules()
        ignored = unit.wrapper._ignored.buffers()
        for module in unit.wrapper.modules():
            for buffer in module.buffers(recurse=False):
                if buffer not in seen:
                    seen.add(buffer)
                    if buffer not in ignored:
                        _cast(buffer, unit)


def _cast(buffer: torch.Tensor, unit: "FlatUnit") -> None:
    dtype = unit.precision.buffer_dtype if buffer.is_floating_point() else None
    if buffer.device != unit.device or (dtype is not None and buffer.dtype != dtype):
        buffer.data = buffer.to(device=unit.device, dtype=dtype or buffer.dtype)
