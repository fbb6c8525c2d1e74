"""A model of which each microbatch uses another part."""

from __future__ import annotations

import torch
from torch import nn

from shardproof.harness.models.plain import MLP


class Branches(nn.Module):
    """A Linear(dim, dim) and tanh, then one of several MLPs, chosen by an argument.

    The MLPs have different sizes, and dimensions that neither two nor four ranks divide for an odd ``dim``.

    Input: (batch, dim), and the number of the branch, or of several to run one after the other. Output: (batch, dim).

    Args:
        dim: the size of inputs and outputs.
        branches: the number of MLPs.
        alike: whether all MLPs have the size of the first.
    """

    def __init__(self, dim: int, branches: int = 3, *, alike: bool = False) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, dim)
        self.branches = nn.ModuleList(MLP(dim, multiplier=1 if alike else 1 + index) for index in range(branches))

    def forward(self, x: torch.Tensor, branch: int | tuple[int, ...]) -> torch.Tensor:
        x = torch.tanh(self.entry(x))
        for number in (branch,) if isinstance(branch, int) else branch:
            x = self.branches[number](x)
        return x

    def units(self) -> list[list[str]]:
        """Lists of module names, one list per unit: each branch is a unit."""
        return [[f"branches.{index}"] for index in range(len(self.branches))]
