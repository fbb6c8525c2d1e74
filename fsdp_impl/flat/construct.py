"""From the constructor's arguments to a unit, and at the first forward from units to units under one root."""

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_impl.common import dtensor
from fsdp_impl.common.order import OrderCheck
from fsdp_impl.common.owner import Owner
from fsdp_impl.flat import ranks, wrapping
from fsdp_impl.flat.group import FlatContext
from fsdp_impl.flat.layout import flattened, is_dense
from fsdp_impl.flat.options import BackwardPrefetch, CPUOffload, Ignored, MixedPrecision, ShardingStrategy
from fsdp_impl.flat.ranks import Ranks
from fsdp_impl.flat.registry import clean, units_in, without_checkpointing, wrappers
from fsdp_impl.flat.shards import FlatShards
from fsdp_impl.flat.unit import FlatUnit, IterationContext, UnitOptions, cast_buffers


@dataclass(frozen=True)
class Arguments:
    """The constructor's arguments but the module; see ``FullyShardedDataParallel``."""

    process_group: Any
    sharding_strategy: ShardingStrategy | None
    cpu_offload: CPUOffload | None
    auto_wrap_policy: Any
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision | None
    ignored_modules: Any
    param_init_fn: Callable[[nn.Module], None] | None
    device_id: int | torch.device | None
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    ignored_states: Any
    device_mesh: DeviceMesh | None


def build(wrapper: nn.Module, module: nn.Module, arguments: Arguments) -> FlatUnit:
    """Wrap what the policy chooses, then make a unit of the parameters that are left.

    The modules hold the parameters as they were until the unit's group is registered. Modules inside get wrappers of
    the class of ``wrapper``.
    """
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        warnings.warn(
            f"FSDP will not all-gather parameters for containers that do not implement forward: {module}", stacklevel=3
        )
    ignored = wrapping.find_ignored(module, arguments.ignored_modules, arguments.ignored_states)
    strategy = arguments.sharding_strategy or ShardingStrategy.FULL_SHARD
    kind = _device_type(module, ignored, arguments)
    found = ranks.resolve(
        arguments.process_group,
        arguments.device_mesh,
        strategy,
        kind,
        has_policy=arguments.auto_wrap_policy is not None,
    )
    if arguments.auto_wrap_policy is not None:
        inherited = _inherited(arguments, found, ignored)
        wrapping.wrap_inner(module, type(wrapper), inherited, arguments.auto_wrap_policy, ignored)
    strategy, found = _settle(strategy, found)
    device = _prepare(module, ignored, arguments, found, kind)
    precision = arguments.mixed_precision or MixedPrecision()
    left_alone = ignored.buffers()
    options = UnitOptions(
        ranks=found,
        device=device,
        strategy=strategy,
        precision=precision,
        backward_prefetch=arguments.backward_prefetch,
        forward_prefetch=arguments.forward_prefetch,
        limits_gathers=arguments.limit_all_gathers,
        use_orig=arguments.use_orig_params,
        synced=arguments.sync_module_states,
        ignored=ignored,
        buffer_dtypes={clean(name): one.dtype for name, one in module.named_buffers() if one not in left_alone},
        full_in_evaluation=_dtypes_in_evaluation(module),
    )
    return FlatUnit(wrapper, _shard(module, arguments, options), options, initialize)


def _dtypes_in_evaluation(module: nn.Module) -> dict[Owner, torch.dtype] | None:
    """The dtypes of buffers in evaluation if the environment selects full precision there, else ``None``."""
    if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") != "1":
        return None
    found: dict[Owner, torch.dtype] = {}
    for child in module.modules():
        found |= {Owner(child, name): buffer.dtype for name, buffer in child._buffers.items() if buffer is not None}
    return found


def _shard(module: nn.Module, arguments: Arguments, options: UnitOptions) -> FlatShards | None:
    """The parameters that no wrapper inside has taken, sharded; ``None`` if there are none."""
    params, names = wrapping.managed_params(module, options.ignored)
    if not params:
        return None
    offloads = arguments.cpu_offload is not None and arguments.cpu_offload.offload_params
    return FlatShards(
        # The checkpointing wrapper renames what it holds itself when a state dict is loaded.
        without_checkpointing(module),
        params,
        names,
        options.ranks,
        use_orig=options.use_orig,
        compute_dtype=options.precision.param_dtype,
        offloads=offloads,
        # Only from pinned memory do copies to the device overlap with compute.
        pins=offloads and options.device.type != "cpu",
    )


def _settle(strategy: ShardingStrategy, found: Ranks) -> tuple[ShardingStrategy, Ranks]:
    """Sharding over one rank is no sharding."""
    is_single = found.group.size() == 1
    if strategy is not ShardingStrategy.NO_SHARD and not is_single:
        return strategy, found
    if strategy is not ShardingStrategy.NO_SHARD:
        warnings.warn(
            f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.", stacklevel=4
        )
    elif not is_single:
        warnings.warn(
            "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use "
            "`DistributedDataParallel` instead.",
            FutureWarning,
            stacklevel=4,
        )
    return ShardingStrategy.NO_SHARD, found.replicated()


def _device_type(module: nn.Module, ignored: Ignored, arguments: Arguments) -> str:
    asked = torch.device(arguments.device_id) if arguments.device_id is not None else None
    if asked is None and arguments.device_mesh is not None:
        asked = torch.device(arguments.device_mesh.device_type)
    group = arguments.process_group
    first = group[0] if isinstance(group, tuple) and group else group
    known = first if isinstance(first, dist.ProcessGroup) else dist.group.WORLD
    return ranks.device_type(wrapping.unmanaged_params(module, ignored), asked, known)


def _prepare(module: nn.Module, ignored: Ignored, arguments: Arguments, found: Ranks, kind: str) -> torch.device:
    """Make values, move them, and make them equal; returns the device of compute."""

    def params() -> list[nn.Parameter]:
        return list(wrapping.unmanaged_params(module, ignored))

    asked = ranks.requested_device(arguments.device_id, found.group.rank())
    ranks.check_single(params(), asked)
    home = asked or ranks.compute_device((), None, kind, 0)
    materialize(module, ignored, arguments.param_init_fn, home)
    if asked is not None:
        buffers = [b for child in wrapping.managed_modules(module) for b in child.buffers(recurse=False)]
        left_alone = ignored.buffers()
        ranks.move_to(params(), [buffer for buffer in buffers if buffer not in left_alone], asked)
    else:
        ranks.warn_of_cpu(params(), kind)
    device = ranks.compute_device(params(), asked, kind, found.group.rank())
    if arguments.sync_module_states:
        synced = {child for inner, unit in wrappers(module) if unit.options.synced for child in inner.modules()}
        buffers = [b for child in module.modules() if child not in synced for b in child.buffers(recurse=False)]
        sync_states([*dict.fromkeys(buffers), *params()], found, device)
    return device


def _inherited(arguments: Arguments, found: Ranks, ignored: Ignored) -> dict[str, Any]:
    """What wrappers inside get; hybrid ones the same groups, not new ones of their own."""
    shared = vars(arguments) | {
        "auto_wrap_policy": None,
        "ignored_modules": None,
        "ignored_states": list(ignored.params),
    }
    strategy = arguments.sharding_strategy
    if strategy is not None and strategy.is_hybrid and arguments.device_mesh is None:
        shared["process_group"] = (found.group, found.across)
    return shared


# Values


def materialize(
    module: nn.Module, ignored: Ignored, init: Callable[[nn.Module], None] | None, device: torch.device
) -> None:
    """Make what is on the meta device real: by ``init`` for each module, else by ``reset_parameters``."""
    if not _is_on_meta(module, ignored):
        return
    if init is not None and not callable(init):
        raise ValueError(f"Expected {init} to be callable but got {type(init)}")
    for child in _parents_first(module, ignored):
        if init is not None:
            init(child)
        elif [*child.parameters(recurse=False), *child.buffers(recurse=False)]:
            _reset(child, device)


def _reset(module: Any, device: torch.device) -> None:
    try:
        with torch.no_grad():
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()
    except BaseException as error:
        warnings.warn(
            f"Unable to call `reset_parameters()` for module on meta device with error {error}. Please ensure that "
            f"your module of type {type(module)} implements a `reset_parameters()` method.",
            stacklevel=5,
        )
        raise


def _is_on_meta(module: nn.Module, ignored: Ignored) -> bool:
    modules = [child for child in wrapping.managed_modules(module) if child not in ignored.modules]
    return any(param.is_meta for param in wrapping.unmanaged_params(module, ignored)) or any(
        buffer.is_meta for child in modules for buffer in child.buffers(recurse=False)
    )


def _parents_first(module: nn.Module, ignored: Ignored) -> Iterable[nn.Module]:
    managed = wrapping.managed_modules(module)
    queue, seen = deque([module]), {module}
    while queue:
        current = queue.popleft()
        yield current
        for child in current.children():
            if child in managed and child not in seen and child not in ignored.modules:
                seen.add(child)
                queue.append(child)


def sync_states(tensors: Iterable[torch.Tensor], ranks: Ranks, device: torch.device) -> None:
    """Give all ranks the values of ``tensors`` that the first one has; of a DTensor, its local part's. Collective."""
    locals_ = [dtensor.local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]
    if any(local.device.type != device.type for local in locals_):
        raise ValueError(
            "The module has CPU parameters or buffers when `sync_module_states=True`, which requires them to be on "
            "GPU. Please specify the `device_id` argument or move the module to GPU before passing it to FSDP."
        )
    # Across replicas first: it brings the first rank's values to the first rank of every shard group.
    for group in dict.fromkeys([ranks.across, ranks.group]):
        if group is not None and group.size() > 1:
            for local in locals_:
                _broadcast(local.detach(), group)


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    with torch.no_grad():
        flat = flattened(tensor)
        dist.broadcast(flat, group_src=0, group=group)
        if not is_dense(tensor):
            tensor.copy_(flat.view(tensor.size()))


# The first forward


def initialize(unit: FlatUnit) -> None:
    """Make ``unit`` the root of all units in its module, unless it has been initialised.

    Everything is checked before anything but names is changed.

    Raises:
        RuntimeError: if parameters are on another device than the options demand, or a flat one has an optimizer in
            backward.
        ValueError: if units differ in an option that all must share.
        AssertionError: if a unit in it was a root before.
    """
    if unit.is_root is not None:
        return
    units = units_in(unit.wrapper)
    _name(unit.wrapper, units)
    for group in (other.group for other in units if other.group is not None):
        group.check_device()
        if hasattr(group.shards.flat, "_in_backward_optimizers"):
            raise RuntimeError("FSDP optimizer in backward only supported with use_orig_params=True!")
    _check_homogeneous(units)
    for other in units:
        if other is not unit and other.is_root:
            raise AssertionError(
                "Non-root FSDP instance's `_is_root` should not have been set yet or should have been set to `False`"
            )
    context = FlatContext(unit.device, limits_gathers=unit.options.limits_gathers)
    context.create_streams()
    iteration = IterationContext(units, OrderCheck(unit.device) if unit.checks_order else None)
    for other in units:
        other.is_root = other is unit
        other.share(context, iteration)
    for other in units:
        other.choose_precision()
    cast_buffers(units)


def undo(unit: FlatUnit) -> None:
    """Forget that ``unit`` is the root, of which forward has yet to decide."""
    for other in units_in(unit.wrapper):
        other.is_root = None


def _check_homogeneous(units: list[FlatUnit]) -> None:
    options: dict[str, set[Any]] = {
        "_use_orig_params": {unit.options.use_orig for unit in units},
        "limit_all_gathers": {unit.options.limits_gathers for unit in units},
    }
    for name, values in options.items():
        if len(values) > 1:
            raise ValueError(f"Expects one homogeneous value for {name} but got {values}")


def _name(root: nn.Module, units: list[FlatUnit]) -> None:
    """Name groups and parameters from the root, for errors, profiles and seams."""
    found = {module: clean(name) or "(root)" for name, module in root.named_modules()}
    for unit in units:
        if unit.group is not None:
            label = found[unit.wrapper]
            prefix = "" if label == "(root)" else label + "."
            unit.group.label = label
            unit.group.names = [prefix + name for name in unit.group.shards.names]
