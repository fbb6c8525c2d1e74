"""Models whose ranks may run different units, for cases about the order of units."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

Layer = Literal["", "optional", "exit"]


class OptionalUnits(nn.Module):
    """Linear(dim, 8), then two layers without bias of which one may be skipped: ``optional`` and ``exit``.

    Input: (batch, dim). Output: (batch, 4), or (batch, 8) without ``exit``.

    Attributes:
        skipped: the name of the layer that forward leaves out, or "".
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, 8)
        self.optional = nn.Linear(8, 8, bias=False)
        self.exit = nn.Linear(8, 4, bias=False)
        self.skipped: Layer = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.entry(x))
        if self.skipped != "optional":
            hidden = torch.tanh(self.optional(hidden))
        if self.skipped != "exit":
            hidden = torch.tanh(self.exit(hidden))
        return hidden
