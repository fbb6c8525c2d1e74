"""``fully_shard``: make modules one unit."""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import nn
from torch.distributed._composable.contract import contract
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_impl.common.mesh import data_parallel_mesh, default_mesh, device_of
from fsdp_impl.common.policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from fsdp_impl.per_parameter import after_forward, collect
from fsdp_impl.per_parameter.cut import cut
from fsdp_impl.per_parameter.group import ParamGroup
from fsdp_impl.per_parameter.module import FSDPModule, mix_in
from fsdp_impl.per_parameter.registry import unit_of
from fsdp_impl.per_parameter.unit import Unit

_FULL_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = _FULL_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of ``module``, in place, as one unit: gathered by one collective, reduced by another.

    The unit takes all parameters in ``module`` that no unit has taken yet, so call this on inner modules first. A
    parameter of size ``(n, ...)`` becomes a DTensor of the same global size of which each of ``W`` ranks holds
    ``ceil(n / W)`` rows, the last ranks fewer or none. Forward sees the unsharded parameter, gathered before it;
    backward gathers again what was freed, then averages the gradients over the ranks into DTensor gradients.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: 1-D mesh to shard over, or 2-D (replicate, shard) with names: then gradients are also averaged over the
            replicas. Its device type is where parameters are moved to. Default: all ranks, on the accelerator if there
            is one, else on CPU.
        reshard_after_forward: ``True``: free the unsharded parameters after forward and gather them again in backward.
            ``False``: keep them. An int that divides the mesh's size: keep them sharded over groups of so many ranks;
            the mesh's size itself means ``True`` and 1 means ``False``. ``None``: ``True``, but ``False`` for the
            root, the unit that is first to run forward.
        shard_placement_fn: returns for a parameter the dimension to cut it along; ``None`` means ``Shard(0)``. Other
            dimensions must be even.
        mp_policy: dtypes of compute, of reductions and of outputs.
        offload_policy: whether shards live on CPU.
        ignored_params: parameters to leave alone: not sharded, not moved, not reduced.
        dp_mesh_dims: which dimensions of ``mesh``, on which all parameters are DTensors, are data parallel.

    Returns:
        What was given. The modules' classes become ``FSDP{Name}``, subclasses of their own and of ``FSDPModule``.

    Raises:
        ValueError: for a container without forward, a mesh that is not 1-D or 2-D, a scalar parameter, a wrong
            ``reshard_after_forward``, a wrong result of ``shard_placement_fn``, or ``dp_mesh_dims`` that do not fit.
        AssertionError: if a module is a unit already, a 2-D mesh has no names, or a parameter has no such dimension.
        NotImplementedError: for a parameter that is not contiguous, and for an uneven cut along another dimension.
        RuntimeError: if memory is to be pinned and there is no accelerator.
    """
    modules = collect.outermost([module] if isinstance(module, nn.Module) else list(module))
    for member in modules:
        _check_module(member)
    mesh = default_mesh() if mesh is None else mesh
    shard_mesh = data_parallel_mesh(mesh, dp_mesh_dims)
    mesh_after_forward = after_forward.resolve(reshard_after_forward, shard_mesh)
    device = device_of(mesh)
    _check_offload(offload_policy)

    managed = collect.managed_modules(modules, ignored_params or set())
    params = collect.managed_params(managed, ignored_params or set())
    collect.check_params(params, device)
    collect.move_to_device(managed, params, device)
    group = None
    if params:
        cuts = [cut(param, name, shard_mesh, shard_placement_fn) for param, name in params.items()]
        owners = collect.owners_of(params, modules)
        group = ParamGroup(
            list(params), cuts, list(owners.values()), shard_mesh, mesh_after_forward, device, mp_policy, offload_policy
        )
    unit = _mark_composable(list(modules))
    unit.setup(modules, device, group, mp_policy, auto_reshard=reshard_after_forward is None)
    for member in modules:
        mix_in(member)
    return module


def _check_offload(policy: OffloadPolicy) -> None:
    """Learn before anything is changed whether memory can be pinned: without an accelerator that raises."""
    if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory:
        torch.empty(1).pin_memory()


def _mark_composable(modules: list[nn.Module]) -> Unit:
    """Enter ``fully_shard`` in torch's register of composable APIs, where ``replicate`` looks, with a new unit."""

    def mark(marked: Any) -> Any:
        return marked

    mark.__name__ = "fully_shard"  # the name it is registered by
    register: Any = contract(state_cls=Unit)(mark)
    register(modules)
    unit: Unit = register.state(modules[0])
    return unit


def _check_module(module: nn.Module) -> None:
    if unit_of(module) is not None:
        raise AssertionError(
            "Each distinct composable distributed API can only be applied to a module once. fully_shard has already "
            f"been applied to the following module:\n{module}"
        )
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if is_container and type(module).forward is nn.Module.forward:
        raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")


# As torch's, whose decorator gives the function this attribute: the state of a module, for tools; ``None`` for others.
setattr(fully_shard, "state", unit_of)  # noqa: B010 - a function has no such attribute for a type checker
