"""Which unit a collective serves, told by its bytes alone, so that it works for any implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from shardproof.harness.adapters.base import Traits, Units, inner_first

ROOT = "(root)"
"""The label of the root's own unit: the parameters that no other unit has."""


@dataclasses.dataclass(frozen=True)
class UnitSize:
    """The parameters gathered by one collective: ``numel`` elements, ``padded_numel`` with padding."""

    label: str
    names: tuple[str, ...]
    numel: int
    padded_numel: int

    def may_have(self, nbytes: int, itemsize: int) -> bool:
        """Whether the whole unit, in elements of ``itemsize`` bytes, can be ``nbytes`` long."""
        return self.numel * itemsize <= nbytes <= self.padded_numel * itemsize


def units_of(model: nn.Module, units: Units, *, traits: Traits, size: int) -> list[UnitSize]:
    """The units of an unsharded model, the root's own last; units without parameters are left out.

    Args:
        model: the model before anything shards it.
        units: module names, each entry one unit; an inner module's parameters go to the inner unit.
        traits: the implementation's padding.
        size: ranks that share a unit.
    """
    claimed: set[int] = set()
    found = []
    for label, modules in [*((",".join(unit), unit) for unit in inner_first(units)), (ROOT, ("",))]:
        named = []
        for module_name in modules:
            prefix = f"{module_name}." if module_name else ""
            for name, parameter in model.get_submodule(module_name).named_parameters():
                if id(parameter) not in claimed:
                    claimed.add(id(parameter))
                    named.append((prefix + name, parameter))
        if named:
            found.append(_unit(label, named, traits, size))
    return found


def _unit(label: str, named: Sequence[tuple[str, nn.Parameter]], traits: Traits, size: int) -> UnitSize:
    held = sum(traits.local_numel(parameter.shape, size) for _, parameter in named)
    padded = (held + traits.collective_padding) * size
    names = tuple(name for name, _ in named)
    return UnitSize(label, names, sum(parameter.numel() for _, parameter in named), padded)


class UnitLookup:
    """Names the unit of a gather or a reduction by its bytes; "a|b" where several units fit."""

    def __init__(self, units: Sequence[UnitSize]) -> None:
        self.units = tuple(units)

    def __call__(self, kind: str, dtype: str, nbytes: int) -> str:
        if kind not in ("all_gather", "reduce_scatter", "all_reduce"):
            return ""
        itemsize = getattr(torch, dtype).itemsize
        return "|".join(unit.label for unit in self.units if unit.may_have(nbytes, itemsize))
