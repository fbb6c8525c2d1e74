"""Counts the steps of optimizers, for ranks on which a step changes nothing.

A rank may hold no element of a unit, or only frozen ones, and then cannot see in its own parameters that an optimizer
has stepped. All ranks step alike, so all count the same, and agree which gathered values are out of date.
"""

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_impl.flat.shards import is_managed

_count = 0


def count() -> int:
    """The steps, since this module was imported, of all optimizers that have parameters of units."""
    return _count


def _note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    global _count
    if any(is_managed(param) for group in optimizer.param_groups for param in group["params"]):
        _count += 1


register_optimizer_step_post_hook(_note)
