"""Optimizer factories for cases.

Verdicts come from SGD, because Adam's update hardly depends on the scale of the gradients and hides a wrong one.
"""

import functools
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from shardproof.harness.adapters.base import OptimizerFactory


def sgd(*, lr: float = 0.05, momentum: float = 0.9) -> OptimizerFactory:
    """A factory of SGD with momentum.

    Momentum keeps moving a parameter whose gradient is zero, but not one whose gradient is None.
    """
    return functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, foreach=False)


Kernels = Literal["for-loop", "foreach", "fused"]
"""How an optimizer updates its parameters: one by one, in lists, or by one kernel."""


def _options(kernels: Kernels) -> dict[str, Any]:
    # With foreach=None torch chooses by device and type of tensor, so the choice is always explicit.
    return {"foreach": kernels == "foreach", "fused": kernels == "fused"}


def adam(*, lr: float = 1e-2, kernels: Kernels = "for-loop") -> OptimizerFactory:
    """A factory of Adam, for twins that are compared bit for bit and for comparisons after one step."""
    return functools.partial(torch.optim.Adam, lr=lr, **_options(kernels))


def adamw(*, lr: float = 1e-2, kernels: Kernels = "for-loop") -> OptimizerFactory:
    """A factory of AdamW, for twins that are compared bit for bit and for comparisons after one step."""
    return functools.partial(torch.optim.AdamW, lr=lr, **_options(kernels))


Kind = Literal["momentum", "nesterov", "adamw", "amsgrad"]
"""An optimizer with its options: SGD with momentum, SGD with Nesterov's momentum and decay, AdamW, AdamW of AMSGrad."""


def of_kind(kind: Kind, kernels: Kernels) -> OptimizerFactory:
    """A factory for runs that have the bits of their baseline, so that all steps of any optimizer can be compared."""
    options = _options(kernels)
    momentum = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, **options)
    match kind:
        case "momentum":
            return functools.partial(momentum, dampening=0.25)
        case "nesterov":
            return functools.partial(momentum, nesterov=True, weight_decay=0.1)
        case _:
            amsgrad = kind == "amsgrad"
            return functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, amsgrad=amsgrad, **options)


class Averages(torch.optim.Optimizer):
    """Moves parameters against the sum of running averages of their gradients, one for each horizon in steps.

    Each parameter has six tensors of state, whose names can come in many orders.
    """

    HORIZONS = (1, 2, 4, 8, 16, 32)

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for horizon in self.HORIZONS:
                    average = state.setdefault(f"average of {horizon}", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 1 / horizon)
                    parameter.sub_(average, alpha=group["lr"] / len(self.HORIZONS))


def _in_two_groups(
    parameters: Iterable[nn.Parameter], *, kind: Literal["adam", "adamw"], lr: float
) -> torch.optim.Optimizer:
    given = list(parameters)
    groups: list[dict[str, Any]] = [{"params": given[::2]}, {"params": given[1::2], "lr": lr / 4, "weight_decay": 0.1}]
    if kind == "adam":
        return torch.optim.Adam(groups, lr=lr, foreach=False)
    return torch.optim.AdamW(groups, lr=lr, foreach=False)


def of_trainable(factory: OptimizerFactory) -> OptimizerFactory:
    """The same factory, given the parameters that require gradients alone."""
    return lambda parameters: factory([one for one in parameters if one.requires_grad])


def beside_its_own(factory: OptimizerFactory) -> OptimizerFactory:
    """The same factory, with a first group of one parameter that is none of the model's."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given = list(parameters)
        own = nn.Parameter(torch.zeros(3, device=given[0].device))
        groups: list[Any] = [{"params": [own]}, {"params": given}]
        return factory(groups)

    return make


def in_two_groups(kind: Literal["adam", "adamw"], *, lr: float = 1e-2) -> OptimizerFactory:
    """A factory of Adam or AdamW with two groups of parameters, which take turns.

    The second has a quarter of the learning rate, and a weight decay of its own.
    """
    return functools.partial(_in_two_groups, kind=kind, lr=lr)
