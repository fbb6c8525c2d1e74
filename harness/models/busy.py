"""Models for cases that measure time and memory: layers that occupy the stream, and layers of equal sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardproof.harness.models.plain import MLP, Stacked
from shardproof.harness.tensors.streams import occupy


class BusyTower(Stacked):
    """``depth`` MLPs, each of which occupies the stream at the end of its forward and at the start of its backward.

    No two units have the same size, as in ``Tower``. Input and output: (batch, dim).

    Args:
        dim: the width.
        depth: the number of layers.
        milliseconds: how long a layer occupies the stream, each time.
    """

    def __init__(self, dim: int, depth: int, milliseconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_BusyMLP(dim, 2 + index, milliseconds) for index in range(depth))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.run_layers(x))
        return out


class _BusyMLP(MLP):
    def __init__(self, dim: int, multiplier: int, milliseconds: float) -> None:
        super().__init__(dim, multiplier)
        self.milliseconds = milliseconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Occupying.apply(super().forward(x), self.milliseconds)  # type: ignore[no-untyped-call]
        return out


class _Occupying(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, milliseconds: float) -> torch.Tensor:
        ctx.milliseconds = milliseconds
        occupy(milliseconds, device_type=x.device.type)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        occupy(ctx.milliseconds, device_type=gradient.device.type)
        return gradient.clone(), None


class EqualLayers(Stacked):
    """``depth`` layers of one square weight each, with a tanh between them; the root has no parameters of its own.

    Input and output: (batch, dim).

    Args:
        dim: the width; a layer has 4 x dim x dim bytes.
        depth: the number of layers.
    """

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x
