"""A model of which each layer divides among the ranks of a large world in another way."""

from __future__ import annotations

import torch
from torch import nn

from shardproof.harness.models.plain import Stacked

WIDTH = 12


class Rows(Stacked):
    """Four MLPs ``layers.N`` of different hidden widths and, in the root's own unit, a Linear.

    Of ``size`` ranks all hold as many rows of the first layer; of the second the last quarter holds none, because
    chunks are rounded up; of the third the last four ranks hold none, of the last layer the second half; of the root's
    own unit 12 ranks hold all. No two units have the same size, however many ranks there are.

    The number of elements of every parameter is a multiple of four, so that flat parameters need no alignment.

    Input and output: (batch, 12).

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        hidden = (2 * size, 3 * size + 4, size - 4, size // 2)
        self.layers = nn.ModuleList(_MLP(width - width % 4) for width in hidden)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.run_layers(x))
        return out


class _MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, max(hidden, 4))
        self.out_proj = nn.Linear(max(hidden, 4), WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out_proj(torch.tanh(self.in_proj(x)))
        return out
