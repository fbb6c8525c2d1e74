"""From the constructor's arguments to a unit's parameters."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_impl.flat import collect, devices, materialize, ranks
from fsdp_impl.flat.collect import Ignored
from fsdp_impl.flat.group import FlatGroup
from fsdp_impl.flat.names import without_checkpointing
from fsdp_impl.flat.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_impl.flat.ranks import Ranks
from fsdp_impl.flat.shards import FlatShards
from fsdp_impl.flat.wrap import wrap_inner


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


@dataclass(frozen=True)
class Built:
    """What a wrapper is made of; ``group`` is ``None`` if no parameters were left to shard."""

    ignored: Ignored
    ranks: Ranks
    strategy: ShardingStrategy
    device: torch.device
    group: FlatGroup | None


def build(module: nn.Module, wrapper: type[nn.Module], arguments: Arguments) -> Built:
    """Wrap what the policy says, then take and shard the parameters that are left."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        warnings.warn(
            f"FSDP will not all-gather parameters for containers that do not implement forward: {module}", stacklevel=3
        )
    ignored = Ignored(module, arguments.ignored_modules, arguments.ignored_states)
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
        wrap_inner(module, wrapper, _inherited(arguments, found, ignored), arguments.auto_wrap_policy, ignored)
    strategy, found = _settle(arguments.sharding_strategy, strategy, found)
    device = _prepare(module, ignored, arguments, found, kind)
    params, names = collect.managed_params(module, ignored)
    if not params:
        return Built(ignored, found, strategy, device, None)
    precision = arguments.mixed_precision or MixedPrecision()
    offloads = arguments.cpu_offload is not None and arguments.cpu_offload.offload_params
    shards = FlatShards(
        # The checkpointing wrapper renames what it holds itself when a state dict is loaded.
        without_checkpointing(module),
        params,
        names,
        found,
        use_orig=arguments.use_orig_params,
        compute_dtype=precision.param_dtype,
        offloads=offloads,
        # Only from pinned memory do copies to the device overlap with compute.
        pins=offloads and device.type != "cpu",
    )
    return Built(ignored, found, strategy, device, FlatGroup(shards, device, precision.param_dtype))


def _settle(asked: ShardingStrategy | None, strategy: ShardingStrategy, found: Ranks) -> tuple[ShardingStrategy, Ranks]:
    """Sharding over one rank is no sharding."""
    if found.group.size() == 1 and strategy is not ShardingStrategy.NO_SHARD:
        warnings.warn(
            f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.", stacklevel=4
        )
        return ShardingStrategy.NO_SHARD, found.replicated()
    if strategy is ShardingStrategy.NO_SHARD:
        if found.group.size() > 1:
            warnings.warn(
                "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use "
                "`DistributedDataParallel` instead.",
                FutureWarning,
                stacklevel=4,
            )
        return strategy, found.replicated()
    return strategy, found


def _device_type(module: nn.Module, ignored: Ignored, arguments: Arguments) -> str:
    asked = torch.device(arguments.device_id) if arguments.device_id is not None else None
    if asked is None and arguments.device_mesh is not None:
        asked = torch.device(arguments.device_mesh.device_type)
    group = arguments.process_group
    first = group[0] if isinstance(group, tuple) and group else group
    known = first if isinstance(first, dist.ProcessGroup) else dist.group.WORLD
    return devices.device_type(collect.unmanaged_params(module, ignored), asked, known)


def _prepare(module: nn.Module, ignored: Ignored, arguments: Arguments, found: Ranks, kind: str) -> torch.device:
    """Make values, move them, and make them equal; returns the device of compute."""

    def params() -> list[nn.Parameter]:
        return list(collect.unmanaged_params(module, ignored))

    asked = devices.requested(arguments.device_id, found.group.rank())
    devices.check_single(params(), asked)
    home = asked or devices.compute_device((), None, kind, 0)
    materialize.materialize(module, ignored, arguments.param_init_fn, home)
    if asked is not None:
        buffers = [b for child in collect.managed_modules(module) for b in child.buffers(recurse=False)]
        left_alone = ignored.buffers()
        devices.move(params(), [buffer for buffer in buffers if buffer not in left_alone], asked)
    else:
        devices.warn_of_cpu(params(), kind)
    device = devices.compute_device(params(), asked, kind, found.group.rank())
    if arguments.sync_module_states:
        synced = {child for inner in collect.wrappers(module) if inner._synced for child in inner.modules()}
        buffers = [b for child in module.modules() if child not in synced for b in child.buffers(recurse=False)]
        materialize.sync_states([*dict.fromkeys(buffers), *params()], found, device)
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
