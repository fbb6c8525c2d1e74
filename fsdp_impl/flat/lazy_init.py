"""What waits until the first forward: only then are all units in place, and the first to run is the root."""

from typing import TYPE_CHECKING, Any

from torch import nn

from fsdp_impl.common.order import OrderCheck
from fsdp_impl.flat import buffers, names
from fsdp_impl.flat.context import FlatContext, IterationContext
from fsdp_impl.flat.group import FlatGroup

if TYPE_CHECKING:
    from fsdp_impl.flat.unit import FlatUnit


def ensure(unit: "FlatUnit") -> None:
    """Make ``unit`` the root of all units in its module, unless it has been initialised.

    Everything is checked before anything is changed.

    Raises:
        RuntimeError: if parameters are not where the options say, or a flat one has an optimizer in backward.
        ValueError: if units differ in an option that all must share.
        AssertionError: if a unit in it was a root before.
    """
    if unit.is_root is not None:
        return
    units = units_in(unit.wrapper)
    for group in (other.group for other in units if other.group is not None):
        _check_device(group)
        if hasattr(group.shards.flat, "_in_backward_optimizers"):
            raise RuntimeError("FSDP optimizer in backward only supported with use_orig_params=True!")
    _check_homogeneous(units)
    for other in units:
        if other is not unit and other.is_root:
            raise AssertionError(
                "Non-root FSDP instance's `_is_root` should not have been set yet or should have been set to `False`"
            )
    _name(unit.wrapper, units)
    context = FlatContext(unit.device)
    context.limits_gathers = unit.limits_gathers
    context.create_streams()
    iteration = IterationContext()
    iteration.units = units
    if unit.checks_order:
        iteration.order = OrderCheck(unit.device)
    for other in units:
        other.is_root = other is unit
        other.share(context, iteration)
    buffers.cast_buffers(units)


def undo(unit: "FlatUnit") -> None:
    """Forget that ``unit`` is the root, of which forward has yet to decide."""
    for other in units_in(unit.wrapper):
        other.is_root = None


def units_in(module: nn.Module) -> list["FlatUnit"]:
    """The units of all wrappers in ``module``, itself included, in the order of ``modules()``."""
    from fsdp_impl.flat.module import FullyShardedDataParallel

    return [inner._unit for inner in module.modules() if isinstance(inner, FullyShardedDataParallel)]


def _check_device(group: FlatGroup) -> None:
    found = group.shards.flat.device
    if group.shards.offloads and found.type != "cpu":
        raise RuntimeError(
            f"An FSDP-managed module with parameter CPU offloading enabled has parameters on {found}. Make sure to not "
            f"move the module from CPU when offloading parameters. Found in the unit of {group.names}"
        )
    if not group.shards.offloads and found != group.device:
        raise RuntimeError(
            f"An FSDP-managed module unexpectedly has parameters on {found}. Make sure to move the module to "
            f"{group.device} before training. Found in the unit of {group.names}"
        )


def _check_homogeneous(units: list["FlatUnit"]) -> None:
    options: dict[str, set[Any]] = {
        "_use_orig_params": {unit.wrapper._use_orig_params for unit in units},
        "limit_all_gathers": {unit.limits_gathers for unit in units},
    }
    for name, values in options.items():
        if len(values) > 1:
            raise ValueError(f"Expects one homogeneous value for {name} but got {values}")


def _name(root: nn.Module, units: list["FlatUnit"]) -> None:
    """Name groups and parameters from the root, for errors, profiles and seams."""
    found = names.module_names(root)
    for unit in units:
        if unit.group is not None:
            label = found[unit.wrapper]
            prefix = "" if label == "(root)" else label + "."
            unit.group.label = label
            unit.group.names = [prefix + name for name in unit.group.shards.names]
