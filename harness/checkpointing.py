"""Activation checkpointing of a model's parts, by each of torch's own means, before anything shards it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

Kind = Literal["composable", "wrapper", "around", "around-reentrant"]

_WRAPPED = "_checkpoint_wrapped_module."


def recompute(model: nn.Module, names: Sequence[str], *, kind: Kind) -> nn.Module:
    """Have backward recompute these modules, in place.

    Args:
        model: not sharded yet.
        names: of the modules.
        kind: "composable" hooks into each module; "wrapper" puts a wrapper in its place, which is what is then
            sharded; "around" has the caller checkpoint its call of the module, so that what shards the module is
            inside what is recomputed, and "around-reentrant" the same by the re-entrant autograd function.
    """
    for name in names:
        module = model.get_submodule(name)
        if kind == "composable":
            composable(module)
        else:
            parent, _, child = name.rpartition(".")
            put = checkpoint_wrapper(module) if kind == "wrapper" else _Around(module, kind == "around-reentrant")
            setattr(model.get_submodule(parent), child, put)
    return model


def original_name(name: str) -> str:
    """A parameter's name in the model without checkpointing."""
    return name.replace(_WRAPPED, "")
