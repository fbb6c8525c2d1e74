"""Applies activation checkpointing to a model's layers, by each of torch's means, before the model is sharded."""

from __future__ import annotations

import collections
from typing import Any, Literal

import torch
from torch import nn

# Private names of torch: these two functions have no public ones yet.
from torch.distributed._composable.checkpoint_activation import checkpoint as checkpoint_by_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardproof.harness.models.plain import Stacked

Means = Literal["hooks", "wrapper", "call", "reentrant-call"]


def recompute(model: nn.Module, means: Means) -> nn.Module:
    """Change a model in place so that backward recomputes each of its ``layers``.

    Args:
        model: a :class:`Stacked` model that is not sharded yet.
        means: how each layer is recomputed:

            - "hooks": by hooks on the layer (the composable ``checkpoint``).
            - "wrapper": by a wrapper module in the layer's place, which is then the module that is sharded.
            - "call": by calling it through ``torch.utils.checkpoint``, so that the hooks of the implementation that
              shards the layer run again during the recomputation.
            - "reentrant-call": as "call", with the re-entrant autograd function.

    Returns:
        The same model.
    """
    assert isinstance(model, Stacked), f"{type(model).__name__} has no layers to recompute"
    if means in ("call", "reentrant-call"):
        model.calls = "recomputed" if means == "call" else "recomputed-reentrant"
        return model
    for index, layer in enumerate(model.layers):
        if means == "hooks":
            checkpoint_by_hooks(layer)
        else:
            model.layers[index] = checkpoint_wrapper(layer)
    return model


class Computations:
    """Counts how often each layer computes, and checks that no activation of a recomputed layer waits for backward.

    Pass :meth:`watch` a plain model in ``prepare``, :meth:`loss` to the step, and call :meth:`check` after the step::

        computations = Computations(models.mean_square, inside="w1")
        pair = rank.pair(model, prepare=lambda plain: recompute(computations.watch(plain), means), ...)
        pair.step(batch, loss=computations.loss)
        computations.check()

    Args:
        loss: the loss of the step.
        inside: the name, within a layer, of a module whose output backward needs.
    """

    def __init__(self, loss: Any, *, inside: str) -> None:
        self._loss = loss
        self._inside = inside
        self._names: list[str] = []
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self._activations: dict[str, StorageWeakRef] = {}
        self._held: list[str] = []

    def watch(self, model: nn.Module) -> nn.Module:
        """Watch the layers of a :class:`Stacked` model from here on, and return the model."""
        assert isinstance(model, Stacked), f"{type(model).__name__} has no layers to watch"
        for index, layer in enumerate(model.layers):
            name = f"layers.{index}"
            self._names.append(name)
            layer.get_submodule(self._inside).register_forward_hook(
                lambda module, inputs, output, name=name: self._note(name, output)
            )
        return model

    def loss(self, output: Any) -> torch.Tensor:
        """Return the loss, and note which activations of the forward are still in memory."""
        self._held += [name for name, storage in self._activations.items() if not storage.expired()]
        self._activations.clear()
        value: torch.Tensor = self._loss(output)
        return value

    def check(self, *, times: int = 1) -> None:
        """Check that since the last call each layer computed in forward and again in backward.

        Args:
            times: the number of microbatches since the last call.

        Raises:
            AssertionError: a layer computed more or less often, or what it computed in forward was held until backward.
        """
        counts = {name: tuple(self._counts[name, phase] for phase in ("forward", "backward")) for name in self._names}
        held, self._held = self._held, []
        self._counts.clear()
        wrong = {name: found for name, found in counts.items() if found != (times, times)}
        assert not wrong, (
            f"layers computed another number of times than {times} in forward and {times} in backward: "
            + ", ".join(f"{name} {forward} and {backward}" for name, (forward, backward) in wrong.items())
        )
        assert not held, f"activations of recomputed layers stay in memory until backward: {', '.join(held)}"

    def _note(self, name: str, output: torch.Tensor) -> None:
        # Private, as autograd has no public way to ask: a recomputation runs inside of a backward.
        is_backward = torch._C._current_graph_task_id() != -1
        self._counts[name, "backward" if is_backward else "forward"] += 1
        if not is_backward:
            local = output.to_local() if isinstance(output, DTensor) else output
            self._activations[name] = StorageWeakRef(local.untyped_storage())
