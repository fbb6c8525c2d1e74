"""Reads which batches roots are given in one step, by hooks that are there in this step alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardproof.harness.watching.hooks import Hook, guarded
from shardproof.harness.watching.model import Model
from shardproof.harness.watching.step import Forwards


class StepInputs:
    """The inputs of the forwards of models in one step, between :meth:`begin` and :meth:`end`.

    Args:
        on_error: takes an error of ours in a hook.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error, self._passes = on_error, ()
        self._handles: list[Any] = []
        self._seen: dict[int, Forwards] = {}

    def begin(self, models: Sequence[Model]) -> None:
        """Register the hooks, if they are not there; a hook would compile a compiled module anew."""
        for model in models if not self._handles else ():
            forwards = self._seen[id(model)] = Forwards()
            for root in model.roots if not model.is_compiled else ():
                hook = Hook(lambda module, args, kwargs, own=forwards: self._on_forward(own, module, args, kwargs))
                self._handles.append(root.register_forward_pre_hook(hook, with_kwargs=True))

    def end(self) -> dict[int, Forwards]:
        """Remove the hooks, and return what each model was given, by id."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        seen, self._seen = self._seen, {}
        return seen

    @guarded
    def _on_forward(self, forwards: Forwards, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                forwards.begin()
                forwards.take_batch((args, kwargs), 0)
