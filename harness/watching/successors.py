"""Finds the model that replaces one after its last step, as where a training resumes in the same process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from shardproof.harness.watching.model import Model
from shardproof.harness.watching.names import objects_of, parameters_of
from shardproof.harness.watching.optimizers import have_shapes, parameters_in

#: How often a process is searched for one.
_SEARCHES = 8


class Successors:
    """Replaces the root of a model by one of the same class, with the same parameters in the same parts.

    Attributes:
        count: how many there were.
    """

    def __init__(self, model: Model) -> None:
        self.count = 0
        self._model = model
        self._former: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._left = _SEARCHES

    def take(self, optimizer: torch.optim.Optimizer) -> bool:
        """Replace the root by one whose parameters an optimizer has, if the process has one; return whether it has."""
        roots, held = self._model.roots, parameters_in(optimizer)
        mine = [one for _, one in self._model.parameters()]
        if len(roots) != 1 or self._left == 0 or not have_shapes(held, mine):
            return False
        self._left -= 1
        found = next(self._alike(roots[0], {id(one) for one in held}), None)
        if found is not None:
            self._former.add(roots[0])
            self._model.replace(found)
            self.count += 1
        return found is not None

    def _alike(self, root: nn.Module, held: set[int]) -> Iterator[nn.Module]:
        places = {name: self._model.place(name, one) for name, one in parameters_of(root)}
        for module in objects_of(type(root)):
            if type(module) is not type(root) or module is root or module in self._former:
                continue
            own = dict(parameters_of(module))
            is_stepped = own.keys() == places.keys() and any(id(one) in held for one in own.values())
            if is_stepped and all(self._model.place(name, one) == places[name] for name, one in own.items()):
                yield module
