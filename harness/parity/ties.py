"""Which parameters of a model are shared by several of its modules, and which of them sharding has untied."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import nn

from shardproof.harness.adapters.base import original_name


@dataclasses.dataclass(frozen=True)
class Tie:
    """One parameter with several names.

    Attributes:
        names: its names in the original model; the first is the one under which ``named_parameters`` lists it.
    """

    names: tuple[str, ...]

    def is_kept(self, modules: Mapping[str, nn.Module]) -> bool:
        """Return whether all modules that hold it as a registered parameter hold the same object.

        A module may hold no parameter of the name, as where parameters are views of a flat one.

        Args:
            modules: the modules of the original model, after sharding, by their names in it.
        """
        found = {id(held) for name in self.names if (held := _registered(modules, name)) is not None}
        return len(found) <= 1

    def __str__(self) -> str:
        first, *others = map(repr, self.names)
        return f"{first} and {', '.join(others)} are one parameter of the model and several of the sharded one"


def ties_of(model: nn.Module) -> list[Tie]:
    """Return the parameters of a model that several modules share."""
    names: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(original_name(name))
    return [Tie(tuple(found)) for found in names.values() if len(found) > 1]


def _registered(modules: Mapping[str, nn.Module], name: str) -> nn.Parameter | None:
    owner, _, leaf = name.rpartition(".")
    module = modules.get(owner)
    return None if module is None else module._parameters.get(leaf)
