"""Copies tensors of a device to the host together: the host waits once for all of them, not once for each."""

from __future__ import annotations

from typing import Any

import torch

from shardproof.harness.tensors.trees import map_tensors, tensors_of


@torch.no_grad()
def on_host(value: Any) -> Any:
    """Return a container with all its tensors on the CPU; tensors that are there already are the same objects.

    Args:
        value: a container of plain tensors, as :func:`map_tensors` handles it. Copies of equal dtype share a storage.
    """
    found: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in tensors_of(value) if tensor.device.type != "cpu"}
    if not found:
        return value
    copies: dict[int, torch.Tensor] = {}
    for kind in {(tensor.dtype, tensor.device) for tensor in found.values()}:
        alike = {key: tensor for key, tensor in found.items() if (tensor.dtype, tensor.device) == kind}
        flat = torch.cat([tensor.reshape(-1) for tensor in alike.values()]).cpu()
        pieces = flat.split([tensor.numel() for tensor in alike.values()])
        copies |= {key: piece.view(found[key].shape) for key, piece in zip(alike, pieces, strict=True)}
    return map_tensors(lambda tensor: copies.get(id(tensor), tensor), value)
