"""Models in which several modules share a parameter, or which use a module twice."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardproof.harness.models.plain import MLP, Stacked, Tower


class TiedMLP(nn.Module):
    """Linear(dim, dim), GELU, and a Linear(dim, dim) with the same weight and a bias of its own, tanh.

    Input and output: (..., dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(F.gelu(self.first(x))))


class TwoNames(nn.Module):
    """Multiplies by a (dim, dim) parameter twice, which it holds under two names, and adds another, tanh.

    Input and output: (..., dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(dim, dim) / dim)
        self.second = self.first
        self.shift = nn.Parameter(torch.randn(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ self.first) @ self.second + self.shift)


class TiedStack(Stacked):
    """Layers that each tie a parameter within their own unit, and a Linear(dim, dim) of the root's own.

    Input and output: (..., dim).
    """

    def __init__(self, dim: int, depth: int = 2, *, layer: Callable[[int], nn.Module] = TiedMLP) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(dim) for _ in range(depth))
        self.out = nn.Linear(dim, dim)


class RepeatedTower(Tower):
    """A :class:`Tower` that runs its layers in turn, and then again, each within a function that ends with a sine.

    A recomputation is that of the function: it begins before backward has reached the output of the layer. Input and
    output: (..., dim).
    """

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        """Call all layers twice."""
        for layer in (*self.layers, *self.layers):
            if self.calls == "plain":
                x = _sine(layer, x)
            else:
                x = checkpoint(_sine, layer, x, use_reentrant=self.calls == "recomputed-reentrant")
        return x


class ReturningTower(Tower):
    """A :class:`Tower` that runs its second layer again after the last, all of whose layers return two tensors.

    The two runs of that layer follow different ones. Input and output: (..., dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.layers = nn.ModuleList(_Pair(dim, multiplier=2 + index) for index in range(len(self.layers)))

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        """Call all layers, and the second one again."""
        for layer in (*self.layers, self.layers[1]):
            first, second = layer(x)
            x = torch.sin(first) + second
        return x


class _Pair(MLP):
    """An :class:`MLP` that also returns twice its output. Input and outputs: (..., dim)."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        out = super().forward(x)
        return out, 2 * out


def _sine(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(layer(x))
