"""What waits until the first forward: only then are all units in place, and the first to run is the root."""

from collections.abc import Sequence

from torch import nn

from fsdp_impl.common import modes
from fsdp_impl.per_parameter.group import KEEP, ParamGroup, Residence
from fsdp_impl.per_parameter.unit import Unit, unit_of


@modes.without_func
def ensure(unit: Unit) -> None:
    """Make ``unit`` the root of all units in its module, unless it has been initialised.

    Everything is checked before anything is changed, so that a forward that fails here can be repaired and repeated.

    Raises:
        RuntimeError: if ``unit`` has several modules, if a unit in it ran forward before or is to be finalized by hand,
            or if parameters are on the meta device, or offloaded ones not on CPU.
        ValueError: if a parameter is managed by two units.
        NotImplementedError: if ``reshard_after_forward`` is not supported for the parameters of a unit.
        AssertionError: if the trainable parameters of a unit differ in dtype.
    """
    if unit.is_root is not None:
        return
    if len(unit.modules) > 1:
        raise RuntimeError(f"FSDP requires a single root module but got {unit.modules}")
    units = _units_below(unit)
    if any(other.iteration.by_hand for other in units if other is not unit):
        raise RuntimeError("set_manual_backward_finalization must be called on the root FSDP module")
    _name(unit.modules[0], units)
    _check_shared_params(units)
    groups = [other.group for other in units if other.group is not None]
    # Those that user code has gathered were checked then, and modules hold their full parameters now.
    check_groups([group for group in groups if group.residence is Residence.SHARDED])
    _join(unit, units)


def check_groups(groups: Sequence[ParamGroup]) -> None:
    """Check what depends on the final parameters of groups."""
    for group in groups:
        group.shards.find_extensions()
    for group in groups:
        group.refresh()
    on_meta = [param.fqn for group in groups for param in group.shards.params if param.sharded.is_meta]
    if on_meta:
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, but the following were still on "
            f"meta device: {on_meta}\nFor example, call module.to_empty(device) to materialize to device and call "
            "module.reset_parameters() on each module to initialize values."
        )
    for group in groups:
        group.shards.check_home()
        group.after_forward.check(group)
    for group in groups:
        dtypes = {param.dtype for param in group.shards.params if param.sharded.requires_grad}
        if len(dtypes) > 1:
            raise AssertionError(f"FSDP expects uniform original parameter dtype but got {dtypes} in {group.label}")


def _units_below(root: Unit) -> list[Unit]:
    units: dict[Unit, None] = {}
    for name, module in root.modules[0].named_modules():
        unit = unit_of(module)
        if unit is None:
            continue
        if unit is not root and unit.is_root is not None:
            raise RuntimeError(
                f"FSDP state has already been lazily initialized for {name}\n"
                "FSDP requires running forward through the root module first"
            )
        units |= dict.fromkeys(unit.parts)
    return list(units)


def _name(root_module: nn.Module, units: list[Unit]) -> None:
    """Name groups and parameters from the root, for errors, profiles and seams."""
    module_names = {module: name or "(root)" for name, module in root_module.named_modules()}
    param_names = {param: name for name, param in root_module.named_parameters()}
    for unit in units:
        if unit.group is None:
            continue
        unit.group.label = ", ".join(module_names.get(module, type(module).__name__) for module in unit.modules)
        for param in unit.group.shards.params:
            param.fqn = param_names.get(param.held(), param.fqn)


def _check_shared_params(units: list[Unit]) -> None:
    seen: set[int] = set()
    for unit in units:
        for param in unit.group.shards.params if unit.group is not None else ():
            if param.serial in seen:
                raise ValueError(
                    f"Parameter '{param.fqn}' is shared with a parameter already managed by another FSDP group. "
                    "For shared/tied parameters, use fully_shard([module_a, module_b]) to place them in one group."
                )
            seen.add(param.serial)


def _join(root: Unit, units: list[Unit]) -> None:
    """Let all units share the root's contexts."""
    root.comm.create_streams()
    root.iteration.units = units
    for unit in units:
        unit.is_root = unit is root
        unit.iteration = root.iteration
        unit.share_comm(root.comm)
        if unit.group is not None:
            unit.group.changes.looks = root.iteration.looks
            root.comm.max_reduce_inputs = max(root.comm.max_reduce_inputs, unit.group.options.max_reduce_inputs)
    for part in root.parts:
        if root.auto_reshard and part.group is not None:
            # Backward begins where forward ends: the root's parameters would be freed just to be gathered again.
            part.group.after_forward = KEEP
