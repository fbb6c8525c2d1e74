"""Applies activation checkpointing to a model's layers, by each of torch's means, before the model is sharded."""

from __future__ import annotations

from typing import Literal

from torch import nn

# Private names of torch: these two functions have no public ones yet.
from torch.distributed._composable.checkpoint_activation import checkpoint as checkpoint_by_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

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
