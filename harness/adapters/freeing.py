"""Frees what models hold that an implementation keeps alive: they would fill the device, one a case."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor


@torch.no_grad()
def free(held: object) -> None:
    """Free the memory of all tensors in nested lists, tuples and mappings, whoever keeps the tensors.

    Pinned memory cannot be freed so; it is the host's, and does not fill the device.

    Args:
        held: tensors of a model that is never used again; anything else is left alone.
    """
    if isinstance(held, DTensor):
        free(held.to_local())
    elif isinstance(held, torch.Tensor):
        storage = held.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
    elif isinstance(held, Mapping):
        for value in held.values():
            free(value)
    elif isinstance(held, list | tuple):
        for value in held:
            free(value)
