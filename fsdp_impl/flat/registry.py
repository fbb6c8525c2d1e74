"""Which modules are wrappers, and what wrapping adds to names."""

from collections.abc import Iterator
from weakref import WeakKeyDictionary, ref

from torch import nn

from fsdp_impl.flat.unit import FlatUnit

#: The attribute under which a wrapper holds its module.
WRAPPED = "_fsdp_wrapped_module"

# What checkpointing wrappers of torch call their module.
_CHECKPOINTED = "_checkpoint_wrapped_module"

# Weak on both sides: the wrapper holds the unit (Note: references).
_units: WeakKeyDictionary[nn.Module, ref[FlatUnit]] = WeakKeyDictionary()


def insert(wrapper: nn.Module, unit: FlatUnit) -> None:
    """Note that ``wrapper`` is a wrapper; it has to hold ``unit``."""
    _units[wrapper] = ref(unit)


def unit_of(module: nn.Module) -> FlatUnit | None:
    """The unit of a wrapper, ``None`` for any other module."""
    held = _units.get(module)
    return None if held is None else held()


def wrappers(module: nn.Module) -> Iterator[tuple[nn.Module, FlatUnit]]:
    """The wrappers in ``module``, itself included, in the order of ``modules()``, and their units."""
    for inner in module.modules():
        if (unit := unit_of(inner)) is not None:
            yield inner, unit


def units_in(module: nn.Module) -> list[FlatUnit]:
    """The units of all wrappers in ``module``, itself included, in the order of ``modules()``."""
    return [unit for _, unit in wrappers(module)]


def clean(name: str) -> str:
    """``name`` of a parameter, buffer or module as it was before any wrapping."""
    return ".".join(part for part in name.split(".") if part not in (WRAPPED, _CHECKPOINTED))


def without_checkpointing(module: nn.Module) -> nn.Module:
    """The module inside a checkpointing wrapper of torch; any other as it is."""
    inner = getattr(module, _CHECKPOINTED, None)
    return inner if isinstance(inner, nn.Module) else module
