"""From a module to its unit."""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from torch import nn

if TYPE_CHECKING:
    from fsdp_impl.per_parameter.unit import Unit

# Weak on both sides: the module holds the unit, through the hooks that the unit registers on it.
_units: "WeakKeyDictionary[nn.Module, ref[Unit]]" = WeakKeyDictionary()


def unit_of(module: nn.Module) -> "Unit | None":
    """The unit that ``module`` was given to ``fully_shard`` for, if it was."""
    reference = _units.get(module)
    return None if reference is None else reference()


def insert(module: nn.Module, unit: "Unit") -> None:
    _units[module] = ref(unit)
