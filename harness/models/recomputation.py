"""Activation checkpointing of a model's parts, by each of torch's own means, before anything shards it."""

from __future__ import annotations

from typing import Literal

from torch import nn

# Under names of torch's own, because these two have no public ones yet.
from torch.distributed._composable.checkpoint_activation import checkpoint as checkpoint_by_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardproof.harness.models.plain import Stacked

Means = Literal["hooks", "wrapper", "call", "reentrant-call"]


def recompute(model: nn.Module, means: Means) -> nn.Module:
    """Have backward recompute each of the model's ``layers``, in place.

    Args:
        model: not sharded yet.
        means: "hooks" on each layer (the composable ``checkpoint``); a "wrapper" in its place, which is what is
            then sharded; a "call" of it through ``torch.utils.checkpoint``, so that the hooks of whatever shards
            the layer run again when it is recomputed; the same through the re-entrant autograd function.
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
