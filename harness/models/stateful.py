"""A model with all that a state dict can hold, for cases about state dicts and checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardproof.harness.models.plain import Stacked


class Recorder(nn.Module):
    """Linear(dim, dim), GELU, a Linear(dim, dim) with the same weight, and what state dicts hold besides.

    ``gain`` is a parameter of one row, ``base`` a frozen one if the model has those. ``offset`` is a floating-point
    buffer, ``calls`` an integer one that counts the forwards, and ``scratch`` is not saved. Input and output: (...,
    dim).
    """

    offset: torch.Tensor
    calls: torch.Tensor
    scratch: torch.Tensor

    def __init__(self, dim: int, *, freezes: bool) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)
        self.second.weight = self.first.weight
        self.gain = nn.Parameter(torch.randn(1, dim))
        self.base = nn.Parameter(torch.randn(dim, 3), requires_grad=not freezes)
        self.register_buffer("offset", torch.randn(dim))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(dim), persistent=False)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.runs += 1
        hidden = self.second(F.gelu(self.first(x))) * self.gain + self.offset * self.scratch
        return torch.tanh(hidden + hidden @ self.base @ self.base.t())


class ExtraRecorder(Recorder):
    """A :class:`Recorder` whose extra state is the number of forwards, as a number."""

    def get_extra_state(self) -> dict[str, int]:
        """The number of forwards."""
        return {"runs": self.runs}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Count on from the number that was saved."""
        self.runs = int(state["runs"])


class Stateful(Stacked):
    """Layers of :class:`Recorder`, each a unit, and a Linear(dim, dim) of the root's own.

    Input and output: (..., dim). Each layer has a frozen parameter if the model ``freezes``.
    """

    def __init__(self, dim: int = 5, *, depth: int = 2, freezes: bool = True, has_extra: bool = False) -> None:
        super().__init__()
        kind = ExtraRecorder if has_extra else Recorder
        self.layers = nn.ModuleList(kind(dim, freezes=freezes) for _ in range(depth))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.run_layers(x))
        return out


def by_columns(model: nn.Module) -> nn.Module:
    """Lay the elements of each matrix column by column."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.detach().t().contiguous().t()
    return model
