"""Which ranks a flat parameter is sharded over and replicated over, and on which device it is computed with."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_impl.common.mesh import check_replicas, current_device
from fsdp_impl.flat.options import ShardingStrategy

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """The data-parallel ranks and the place of this rank among them.

    Attributes:
        group: the process group that shards lie over; under ``NO_SHARD`` the ranks that hold replicas.
        across: process group of the ranks that hold the same shard, ``None`` if nothing was said about replicas.
    """

    group: dist.ProcessGroup
    size: int  # the number of shards, 1 under NO_SHARD
    rank: int
    across: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None  # that the groups came from

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The group of gathers and reduce-scatters, ``None`` if there is nothing to gather."""
        return self.group if self.size > 1 else None

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The group to all-reduce over, ``None`` if there is one of each shard."""
        return self.across if self.replicate_size > 1 else None

    @property
    def replicate_size(self) -> int:
        return self.across.size() if self.across is not None else 1

    def replicated(self) -> "Ranks":
        """These ranks without sharding: they are replicas of each other."""
        if self.across is not None:
            assert self.group.size() == 1, "shards and replicas at once"
            return self
        return replace(self, size=1, rank=0, across=self.group)


def resolve(
    process_group: Any,
    device_mesh: DeviceMesh | None,
    strategy: ShardingStrategy,
    device_type: str,
    *,
    has_policy: bool,
) -> Ranks:
    """The ranks that the constructor's arguments mean."""
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."
        )
    if strategy.is_hybrid:
        return _resolve_hybrid(process_group, device_mesh, strategy, device_type, has_policy=has_policy)
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ValueError(f"{strategy} expects a 1D device_mesh but got {device_mesh}")
        group = device_mesh.get_group(mesh_dim=0)
    else:
        group = process_group if process_group is not None else _default_group()
    return Ranks(group, group.size(), group.rank(), mesh=device_mesh)


def _resolve_hybrid(
    process_group: Any,
    device_mesh: DeviceMesh | None,
    strategy: ShardingStrategy,
    device_type: str,
    *,
    has_policy: bool,
) -> Ranks:
    if process_group is None and device_mesh is None and not has_policy:
        # Each unit would make groups of its own.
        raise ValueError(
            f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh."
        )
    if device_mesh is not None:
        if not isinstance(device_mesh, DeviceMesh) or device_mesh.ndim != 2:
            raise ValueError(f"Expected device_mesh to have ndim=2 but got {getattr(device_mesh, 'ndim', device_mesh)}")
        check_replicas(device_mesh)
        replicas, group = device_mesh.get_group(mesh_dim=0), device_mesh.get_group(mesh_dim=1)
    elif process_group is None:
        group, replicas = _groups_by_host(device_type)
    elif _is_pair_of_groups(process_group):
        group, replicas = process_group
    else:
        raise ValueError(
            "Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, dist.ProcessGroup] "
            f"but got {type(process_group)}"
        )
    return Ranks(group, group.size(), group.rank(), across=replicas, mesh=device_mesh)


def _is_pair_of_groups(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(group, dist.ProcessGroup) for group in value)


def _default_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup | None = dist.group.WORLD
    if group is None:
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
    return group


def _groups_by_host(device_type: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Shards within a host, replicas across hosts; on CPU all ranks count as one host."""
    world = dist.get_world_size()
    per_host = world if device_type == "cpu" else min(world, torch.get_device_module(device_type).device_count())
    group, _ = dist.new_subgroups(per_host)
    replicas: dist.ProcessGroup | None = None
    for first in range(per_host):
        across = dist.new_group(list(range(first, world, per_host)))  # every rank has to take part in each
        if dist.get_rank() % per_host == first:
            replicas = across
    assert replicas is not None
    return group, replicas


# Devices


def requested_device(device_id: int | torch.device | None, rank: int) -> torch.device | None:
    """The device that ``device_id`` names, with an index unless it is the CPU; warns if the index is left to us."""
    if device_id is None:
        return None
    device = torch.device(device_id)
    if device.type == "cpu" or device.index is not None:
        return device
    current = current_device(device.type)
    warnings.warn(
        f"FSDP got the argument `device_id` {device_id} on rank {rank}, which does not have an explicit index. FSDP "
        f"will use the current device {current}. If this is incorrect, please explicitly call "
        f"`torch.{device.type}.set_device()` before FSDP initialization or pass in the explicit device index as the "
        "`device_id` argument.",
        stacklevel=4,
    )
    return current


def device_type(params: Iterable[nn.Parameter], asked: torch.device | None, group: dist.ProcessGroup | None) -> str:
    """The kind of device to compute on: the one asked for, else the parameters', else the accelerator.

    The CPU without an accelerator, and where ``group`` has no back end for the accelerator.
    """
    if asked is not None:
        return asked.type
    kinds = {param.device.type for param in params} - {"cpu", "meta"}
    if len(kinds) > 1:
        raise RuntimeError(f"FSDP does not support modules with different device types but got params on {kinds}")
    if kinds:
        return kinds.pop()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    served = group._device_types if group is not None else [torch.device(accelerator.type)]
    return accelerator.type if torch.device(accelerator.type) in served else "cpu"


def check_single(params: Iterable[nn.Parameter], asked: torch.device | None) -> None:
    """Refuse several devices by a ``RuntimeError``, unless ``device_id`` is that to which parameters on the CPU go."""
    devices = {param.device for param in params}
    if len(devices) == 2 and _CPU in devices:
        if asked is None:
            raise RuntimeError(
                "To support a module with both CPU and GPU params, please pass in device_id argument. Found params on "
                f"{devices}"
            )
    elif len(devices) > 1:
        raise RuntimeError(f"FSDP only supports single device modules but got params on {devices}")


def compute_device(params: Iterable[nn.Parameter], asked: torch.device | None, kind: str, rank: int) -> torch.device:
    """The device to compute on; a ``ValueError`` if parameters are on another device than the one asked for."""
    param = next(iter(params), None)
    device = current_device(kind) if param is None or param.device.type == "cpu" else param.device
    if asked is not None and device != asked:
        raise ValueError(f"Inconsistent compute device and `device_id` on rank {rank}: {device} vs {asked}")
    return device


def move_to(params: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move what is on the CPU, in place."""
    for tensor in [*params, *buffers]:
        if tensor.device == _CPU and device != _CPU:
            with torch.no_grad():
                tensor.data = tensor.to(device)
                if tensor.grad is not None:
                    tensor.grad.data = tensor.grad.to(device)


def warn_of_cpu(params: Iterable[nn.Parameter], kind: str) -> None:
    """Tell that sharding will happen on the CPU although compute will not."""
    param = next(iter(params), None)
    if param is not None and param.device == _CPU and kind != "cpu":
        warnings.warn(
            "The passed-in `module` is on CPU and will thus have FSDP's sharding initialization run on CPU, which may "
            "be slower than on GPU. We recommend passing in the `device_id` argument for FSDP to move `module` to GPU "
            "for the sharding initialization. `module` must also be on GPU device to work with the "
            "`sync_module_states=True` flag since that requires GPU communication.",
            stacklevel=4,
        )
