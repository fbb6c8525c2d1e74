"""A model for rules that choose units: modules of many sizes and classes, in containers and within each other."""

from __future__ import annotations

import torch
from torch import nn


class Parts(nn.Module):
    """A linear layer, two blocks in a list, self-attention, and two heads in a list, with these numbers of elements:

    ==================  ========
    entry                     42
    blocks.0                 109
    blocks.0.inner            49
    blocks.0.back             48
    blocks.1                 174
    blocks.1.inner            84
    blocks.1.back             78
    attention                168
    attention.out_proj        42
    heads                     70
    heads.0, heads.1          35
    ==================  ========

    What is left of a block is its norm, of 12 elements. Attention reads the weight of ``out_proj`` without calling it.

    Input: (batch, 6). Output: (batch, 5).
    """

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(PartsBlock(width) for width in (7, 12))
        self.attention = nn.MultiheadAttention(6, 2)
        self.heads = nn.ModuleList(nn.Linear(6, 5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.entry(x))
        for block in self.blocks:
            x = x + block(x)
        # With weights, attention is computed by separate operations, the same on every device.
        x = x + self.attention(x, x, x, need_weights=True)[0]
        first, second = self.heads
        return torch.tanh(first(x)) * torch.tanh(second(x))


class PartsBase(nn.Module):
    """What blocks have in common, as the base classes of model libraries do."""


class PartsBlock(PartsBase):
    """LayerNorm, Linear(6, width), tanh and Linear(width, 6).

    Input and output: (batch, 6).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Linear(6, width)
        self.back = nn.Linear(width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.back(torch.tanh(self.inner(self.norm(x))))
        return out


class Normed(nn.Module):
    """Linear(4, 6), BatchNorm1d and Linear(6, 4), which note the dtypes of their inputs and of their weights.

    Input and output: (batch, 4).

    Attributes:
        seen: by module, the dtype of its input, of its weight and of its output, in the last forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 4)
        self.seen: dict[str, list[torch.dtype]] = {}
        self.norm.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        self.seen["norm"] = [args[0].dtype, weight.dtype]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        before = x.dtype
        x = self.norm(x)
        self.seen["around"] = [before, x.dtype]
        out: torch.Tensor = self.out(x)
        return out
