"""Reads what DeepSpeed's engine keeps to itself, by its public functions.

The engine owns backward, clipping and the optimizer's step. It reduces gradients into flat partitions, leaves no
``.grad``, and updates weights in float32 that only partitions have. Its functions assemble whole tensors of them: each
read of a partition is a collective of the engine's ranks, so all ranks read the same parameters in the same order.
"""

import importlib
from typing import Any, cast

import torch
from torch import nn

#: What is watched of the engine, as ``calls`` replaces it where the module is imported.
MODULE = "deepspeed.runtime.engine"
STEP = f"{MODULE}.DeepSpeedEngine.step"


def is_engine(module: nn.Module) -> bool:
    """Whether a module is DeepSpeed's engine, whose forward is the model's."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(module).__mro__)


class Engine:
    """One engine, and what it has of a parameter.

    Attributes:
        module: the engine.
        is_stepping: whether it is in a call of ``step`` that updates parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.is_stepping = False
        self._utils: Any = importlib.import_module("deepspeed.utils")

    @property
    def is_at_step(self) -> bool:
        """Whether the next call of ``step`` updates parameters: the others count microbatches."""
        return bool(self.module.is_gradient_accumulation_boundary())

    @property
    def has_stepped(self) -> bool:
        """Whether the last call of ``step`` has updated parameters: not if a scaled gradient was infinite."""
        return bool(self.module.was_step_applied())

    @property
    def base(self) -> torch.optim.Optimizer:
        """The optimizer that the engine was given, or made."""
        return cast(torch.optim.Optimizer, getattr(self.module.optimizer, "optimizer", self.module.optimizer))

    @property
    def rate(self) -> float:
        """The lowest learning rate: which parameter has which is known of partitions alone."""
        return float(min(self.module.get_lr()))

    @property
    def norm(self) -> tuple[Any, float | None]:
        """The total norm of the last step, and what it was clipped to."""
        return self.module.get_global_grad_norm(), self.module.gradient_clipping() or None

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the whole reduced gradient, times the loss scale if there is one."""
        return cast("torch.Tensor | None", self._utils.safe_get_full_grad(parameter))

    def weights(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return what the optimizer updates, whole; None where it does not have the parameter."""
        if any(one is parameter for group in self.base.param_groups for one in group["params"]):
            return parameter
        return cast("torch.Tensor | None", self._utils.safe_get_full_fp32_param(parameter))

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the optimizer's state of the parameter, whole."""
        states = self.base.state
        if parameter in states:
            return {key: one for key, one in states[parameter].items() if isinstance(one, torch.Tensor)}
        tensors = [item for state in states.values() for item in state.items() if isinstance(item[1], torch.Tensor)]
        keys = dict.fromkeys(key for key, value in tensors if value.ndim)
        found = {key: self._utils.safe_get_full_optimizer_state(parameter, key) for key in keys}
        return {key: value for key, value in found.items() if value is not None}
