"""A small model and its batches."""

import torch
from torch import nn

from shardproof.harness.parity.rank import Rank


class MLP(nn.Module):
    """Two linear layers with a smooth activation; hidden size ``2 * dim``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, 2 * dim)
        self.out_proj = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out_proj(torch.tanh(self.in_proj(x))))


def tower(dim: int, depth: int = 3) -> nn.Sequential:
    """A linear layer, which stays with the root, and ``depth`` MLPs; the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(dim, dim), *(MLP(dim) for _ in range(depth)))


def batch(rank: Rank, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Another one on each rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank.index)).to(rank.device)
