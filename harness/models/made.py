"""A model whose modules make their own values, each from a seed of its own, whatever their parameters are by then."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardproof.harness.models.plain import Stacked


class Drawn(nn.Module):
    """``tanh(x @ weight + shift) * gain``, where ``gain`` is a buffer; an integer buffer has the seed.

    Input: (batch, rows). Output: (batch, columns).

    Args:
        rows: the first dimension of the weight.
        columns: its second.
        seed: the seed of all values.
    """

    gain: torch.Tensor
    number: torch.Tensor

    def __init__(self, rows: int, columns: int, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.shift = nn.Parameter(torch.empty(columns))
        self.register_buffer("gain", torch.empty(columns), persistent=False)
        self.register_buffer("number", torch.tensor(0))
        self.seed = seed
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give parameters and buffers the values of the seed, also where parameters are shards by now."""
        generator = torch.Generator().manual_seed(self.seed)
        for tensor in (self.weight, self.shift, self.gain):
            put(tensor, torch.randn(tensor.shape, generator=generator))
        self.number.fill_(self.seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight + self.shift) * self.gain


class Offset(nn.Module):
    """``x + offset``; the offset is a buffer, and there is no parameter.

    Input and output: (batch, columns).

    Args:
        columns: the size of the offset.
        seed: the seed of its values.
    """

    offset: torch.Tensor

    def __init__(self, columns: int, seed: int) -> None:
        super().__init__()
        self.register_buffer("offset", torch.empty(columns))
        self.seed = seed
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give the buffer the values of the seed."""
        put(self.offset, torch.randn(self.offset.shape, generator=torch.Generator().manual_seed(self.seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


class DrawnStack(Stacked):
    """An :class:`Offset`, three :class:`Drawn` layers, one that belongs to the root's own unit, and a factor.

    The factor is a parameter of the root module itself, around the modules that make values of their own.

    Input and output: (batch, dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.start = Offset(dim, 5)
        self.layers = nn.ModuleList(Drawn(dim, dim, seed) for seed in (1, 2, 3))
        self.out = Drawn(dim, dim, 4)
        self.factor = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give the factor its values."""
        put(self.factor, torch.randn(self.factor.shape, generator=torch.Generator().manual_seed(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.run_layers(self.start(x)))
        return out * self.factor


def put(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write full values to a plain tensor or, its part of them, to a DTensor; does not communicate."""
    if isinstance(tensor, DTensor):
        placed = values.to(tensor.device)
        tensor.copy_(distribute_tensor(placed, tensor.device_mesh, tensor.placements, src_data_rank=None))
    else:
        tensor.copy_(values)
