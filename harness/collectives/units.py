"""Matches collectives to units by their size in bytes, which works for any implementation."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from shardproof.harness.adapters.base import Traits, Units, inner_first

ROOT = "(root)"
"""The label of the root's own unit: the parameters that belong to no other unit."""


@dataclasses.dataclass(frozen=True)
class UnitSize:
    """The size of one unit, the parameters that one collective gathers."""

    label: str  # the unit's module names, joined by commas, or :data:`ROOT`
    names: tuple[str, ...]  # the names of its parameters in the unsharded model
    numel: int
    # The most elements that a gather or a reduction of the unit may have, over all ranks and with all padding that the
    # implementation declares.
    padded_numel: int

    def may_have(self, nbytes: int, itemsize: int) -> bool:
        """Whether ``nbytes`` is a possible size of the full unit, with elements of ``itemsize`` bytes."""
        return self.numel * itemsize <= nbytes <= self.padded_numel * itemsize


def units_of(
    model: nn.Module, units: Units, *, traits: Traits, size: int, ignored: Sequence[str] = ()
) -> list[UnitSize]:
    """Return the sizes of the units of an unsharded model, inner units before outer ones, the root's own last.

    The parameters of nested modules belong to the inner unit, and those that are ignored to none; units without
    parameters are left out. ``size`` ranks share a unit.
    """
    claimed = {id(model.get_parameter(name)) for name in ignored}
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
    """Finds the unit of a gather or a reduction by its size.

    Called with a collective's kind, dtype and bytes, it returns the label of the unit: "a|b" if several units fit, ""
    if none fits or the collective is neither a gather nor a reduction.
    """

    def __init__(self, units: Sequence[UnitSize]) -> None:
        self.units = tuple(units)

    def __call__(self, kind: str, dtype: str, nbytes: int) -> str:
        if kind not in ("all_gather", "reduce_scatter", "all_reduce"):
            return ""
        itemsize = getattr(torch, dtype).itemsize
        return "|".join(unit.label for unit in self.units if unit.may_have(nbytes, itemsize))
