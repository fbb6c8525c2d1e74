"""Hooks of the tensors that modules find under the names of parameters, where autograd puts gradients."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardproof.harness.watching.gathered import Gathered
from shardproof.harness.watching.hooks import before_others
from shardproof.harness.watching.model import Model
from shardproof.harness.watching.names import is_its_own, is_view, untransformed

OnGradient = Callable[[str, bool, bool, torch.Tensor], None]
"""Takes a parameter's name, whether what has the hook is a leaf, whether user code has hooks after it, the gradient."""


class TensorHooks:
    """Finds the tensors, and hooks each once.

    Args:
        on_gradient: a hook of the gradient of each.
        on_accumulated: a hook of each leaf: takes the parameter's name and the leaf when its gradient is there.
    """

    def __init__(self, on_gradient: OnGradient, on_accumulated: Callable[[str, torch.Tensor], None]) -> None:
        self.gathered = Gathered()
        self._on_gradient, self._on_accumulated = on_gradient, on_accumulated
        self._handles: list[Any] = []
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}

    def find_with_children(self, name: str, module: nn.Module, model: Model) -> None:
        """Hook what a module has itself, and what those have that it uses without a forward of theirs.

        Lists of parameters have no forward, and attention uses its projection without calling it.
        """
        self.find(name, module, model)
        for last, child in module._modules.items():
            if child is not None and not child._modules and not isinstance(child, FSDPModule):
                self.find(f"{name}.{last}" if name else last, child, model)

    def find(self, name: str, module: nn.Module, model: Model) -> None:
        """Hook what a module has itself."""
        for last, value in _found_in(module).items():
            if value is None or not value.requires_grad:
                continue
            full = f"{name}.{last}" if name else last
            if not model.has(full):
                continue
            if value.is_leaf:  # a view may be invalid, even to ask, once what it is a view of has changed
                self.gathered.find(full, value)
            known = self._hooked.get(id(value))
            if known is None or known() is not value:
                self._hook(full, value)
                model.find_shape(full, value.shape)

    def _hook(self, name: str, value: torch.Tensor) -> None:
        self._hooked[id(value)] = weakref.ref(value)
        # Before hooks of user code, which may change it, and after them.
        hook = functools.partial(self._on_gradient, name, value.is_leaf)
        self._handles += before_others(value, functools.partial(hook, True))
        self._handles.append(value.register_hook(functools.partial(hook, False)))
        if value.is_leaf:
            accumulated = functools.partial(self._on_accumulated, name)
            self._handles.append(value.register_post_accumulate_grad_hook(accumulated))

    def clear(self) -> None:
        """Remove all hooks, and forget what was found."""
        for handle in self._handles:
            handle.remove()
        for seen in (self._handles, self._hooked, self.gathered):
            seen.clear()


def _found_in(module: nn.Module) -> dict[str, torch.Tensor | None]:
    found: dict[str, torch.Tensor | None] = {
        last: value for last, one in module._parameters.items() if is_its_own(value := untransformed(one))
    }
    # Flat parameters put plain views where the parameters were.
    return found | {
        last: value
        for last, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.requires_grad and is_view(value)
    }
