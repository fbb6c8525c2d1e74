"""Gradients whose digests are made on their device, and read when the step has ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardproof.harness.tensors.fingerprints import Digest, K, digests
from shardproof.harness.tensors.layouts import Layout
from shardproof.harness.watching.names import name_of


class Pending:
    """A gradient whose digest is still on its device, or is still to be made of a tensor."""

    __slots__ = ("digest", "dtype", "layout", "tensor")

    def __init__(self, tensor: torch.Tensor, layout: Layout) -> None:
        self.layout, self.dtype = layout, name_of(tensor.dtype)
        self.tensor: torch.Tensor | None = tensor
        self.digest: Digest | None = None


def digest(pending: Sequence[Pending]) -> None:
    """Make the digests of gradients, of those that are alike together."""
    tensors = [one.tensor for one in pending if one.tensor is not None]
    for one, made in zip(pending, digests(tensors, [one.layout.box for one in pending]), strict=True):
        one.digest, one.tensor = made, None


def last_number(value: torch.Tensor | Pending) -> torch.Tensor:
    """Return what is finite if all of an output or of a gradient is."""
    return value if isinstance(value, torch.Tensor) else value.digest.numbers[K]  # type: ignore[union-attr]
