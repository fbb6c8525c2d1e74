"""Copies of tensors that are taken while a step runs, into memory that was reserved before the step.

A copy is work on the current stream, where a training script would read the tensor. It makes neither the host nor
another stream wait, and after the first step it allocates nothing, so that the allocator hands the implementation the
same memory with and without copies.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

_Kind = tuple[torch.Size, torch.dtype, torch.device]


class Snapshots:
    """Copies the tensors of one step after another; each copy belongs to the caller and is never written again."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}
        self._reserved: dict[Hashable, torch.Tensor] = {}

    def reserve(self) -> None:
        """Allocate memory for the tensors that the last step copied; call it before a step."""
        for key, (shape, dtype, device) in self._kinds.items():
            if key not in self._reserved:
                self._reserved[key] = torch.empty(shape, dtype=dtype, device=device)

    @torch.no_grad()
    def copy(self, key: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Return a detached copy of a tensor, in reserved memory where the tensor is like that of the last step.

        Args:
            key: tells the tensors of one step apart.
            tensor: a tensor on any device; a subclass such as DTensor is cloned as it is.
        """
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return tensor.detach().clone()
        kind = tensor.shape, tensor.dtype, tensor.device
        reserved = self._reserved.pop(key, None)
        self._kinds[key] = kind
        if reserved is None or (reserved.shape, reserved.dtype, reserved.device) != kind:
            return tensor.detach().clone()
        return reserved.copy_(tensor)
