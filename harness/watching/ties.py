"""Remembers which parameters were registered in several places, from the construction of the model on."""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardproof.harness.watching.names import modules_of


class Ties:
    """Notes each registration of a parameter that a module has already; :meth:`close` ends it."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[weakref.ref[Any], weakref.ref[nn.Module], str]] = {}
        self._pairs: list[tuple[tuple[weakref.ref[nn.Module], str], tuple[weakref.ref[nn.Module], str]]] = []
        self._handle = register_module_parameter_registration_hook(self._on_registration)

    def close(self) -> None:
        """Note no more."""
        self._handle.remove()

    def names(self, roots: Sequence[nn.Module]) -> list[tuple[str, ...]]:
        """Return the canonical names of what was one parameter in the modules of these roots."""
        names: dict[int, str] = {}
        for root in roots:
            for name, module in modules_of(root):
                names[id(module)] = name
        found = []
        for pair in self._pairs:
            places = []
            for ref, last in pair:
                owner = ref()
                if owner is not None and id(owner) in names:
                    name = names[id(owner)]
                    places.append(f"{name}.{last}" if name else last)
            if len(places) == 2 and places[0] != places[1]:
                found.append(tuple(places))
        return found

    def _on_registration(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None:
            return
        known = self._first.get(id(parameter))
        if known is not None and known[0]() is parameter:
            owner = known[1]()
            if owner is not None and owner is not module and owner._parameters.get(known[2]) is parameter:
                self._pairs.append(((known[1], known[2]), (weakref.ref(module), name)))
                return
        self._first[id(parameter)] = (weakref.ref(parameter), weakref.ref(module), name)
