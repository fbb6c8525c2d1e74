"""``fully_shard``: make modules one unit."""

from collections.abc import Iterable, Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_impl.common.mesh import current_device
from fsdp_impl.common.owner import Owner
from fsdp_impl.common.private import contract, is_wrapper_subclass, registry_of
from fsdp_impl.per_parameter import lazy_init, spmd
from fsdp_impl.per_parameter.extension import ExtendableShards
from fsdp_impl.per_parameter.group import ParamGroup
from fsdp_impl.per_parameter.mesh import ShardMesh, default_mesh
from fsdp_impl.per_parameter.module import FSDPModule, mix_in
from fsdp_impl.per_parameter.options import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fsdp_impl.per_parameter.param import Cut, PlacementFn, cut, place
from fsdp_impl.per_parameter.smaller import after_forward
from fsdp_impl.per_parameter.spmd import DataParallelMeshDims, data_parallel_mesh
from fsdp_impl.per_parameter.unit import Unit, unit_of

_FULL_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
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
    shard_placement_fn: PlacementFn | None = ...,
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
    shard_placement_fn: PlacementFn | None = None,
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
            dimensions must be even. With a ``ShardPlacementResult`` it returns also the mesh to shard it over, as for
            experts that expert parallelism has divided among some of the ranks: then the parameters of each mesh are
            gathered and reduced by themselves, and an average is one over the ranks of that mesh.
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
    modules = outermost([module] if isinstance(module, nn.Module) else list(module))
    for member in modules:
        _check_module(member)
    mesh = default_mesh() if mesh is None else mesh
    shard_mesh = data_parallel_mesh(mesh, dp_mesh_dims)
    device = current_device(mesh.device_type)
    _check_offload(offload_policy)

    managed = managed_modules(modules, ignored_params or set())
    params = managed_params(managed, ignored_params or set())
    check_params(params, device)
    parts = _by_mesh(params, shard_mesh, shard_placement_fn)
    leaves = {of_mesh: after_forward(reshard_after_forward, of_mesh) for of_mesh in parts}
    move_to_device(managed, params, device)
    owners = owners_of(params, modules)
    units: list[Unit] = []  # several only with several meshes (see Note: units of several meshes)
    for of_mesh, placements in parts.items():
        group = None
        if placements:
            cuts = [_cut(param, params[param], of_mesh, placement) for param, placement in placements.items()]
            held = [owners[param] for param in placements]
            shards = ExtendableShards(list(placements), cuts, held, of_mesh, mp_policy, offload_policy)
            group = ParamGroup(shards, of_mesh, leaves[of_mesh], device, mp_policy)
        auto = reshard_after_forward is None
        units.append(Unit(modules, device, group, mp_policy, lazy_init.ensure, auto_reshard=auto, inner=tuple(units)))
    _mark_composable(units[-1])
    for unit in units:
        unit.register()
    for member in modules:
        mix_in(member)
    return module


def _by_mesh(
    params: dict[nn.Parameter, str], mesh: ShardMesh, placement_fn: PlacementFn | None
) -> dict[ShardMesh, dict[nn.Parameter, Shard | None]]:
    """``params`` by their meshes, each with its placement; ``mesh`` with none if there are no parameters."""
    found: dict[ShardMesh, dict[nn.Parameter, Shard | None]] = {}
    for param, name in params.items():
        placement, its = place(param, name, mesh, placement_fn)
        same = next((one for one in (mesh, *found) if one.mesh == its.mesh), its)
        found.setdefault(same, {})[param] = placement
    return found or {mesh: {}}


def _cut(param: nn.Parameter, name: str, mesh: ShardMesh, placement: Shard | None) -> Cut:
    return (spmd.cut if spmd.is_spmd(param, mesh) else cut)(param, name, mesh, placement)


def _check_offload(policy: OffloadPolicy) -> None:
    """Learn before anything is changed whether memory can be pinned: without an accelerator that raises."""
    if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory:
        torch.empty(1).pin_memory()


def _mark_composable(unit: Unit) -> None:
    """Enter ``fully_shard`` in torch's register of composable APIs, where ``replicate`` looks."""

    def mark(marked: Any) -> Any:
        return marked

    mark.__name__ = "fully_shard"  # the name it is registered by
    contract()(mark)(list(unit.modules))


def _check_module(module: nn.Module) -> None:
    if unit_of(module) is not None:
        raise AssertionError(
            "Each distinct composable distributed API can only be applied to a module once. fully_shard has already "
            f"been applied to the following module:\n{module}"
        )
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if is_container and type(module).forward is nn.Module.forward:
        raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")


# What one call is about


def outermost(modules: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """``modules`` without those that are inside another of them, and without repeats."""
    inside = {inner for module in modules for inner in module.modules() if inner is not module}
    return tuple(dict.fromkeys(module for module in modules if module not in inside))


def managed_modules(roots: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[nn.Module]:
    """The modules in ``roots`` but those that belong to another unit or to ``replicate``, children before parents.

    Nor those of which everything is ``ignored``.
    """
    visited: set[nn.Module] = set()
    found = [module for root in roots for module in _not_taken(root, roots, visited)]
    return [module for module in found if not _is_ignored(module, ignored)]


def _not_taken(module: nn.Module, roots: Sequence[nn.Module], visited: set[nn.Module]) -> list[nn.Module]:
    """``module`` and what is in it, children first, without what is ``visited`` or belongs to others.

    Not a local function: one that calls itself is a cycle, and would keep the model (see Note: ownership).
    """
    foreign = "replicate" in (registry_of(module) or ())
    if module in visited or foreign or (module not in roots and unit_of(module) is not None):
        return []
    visited.add(module)
    return [*(inner for child in module.children() for inner in _not_taken(child, roots, visited)), module]


def _is_ignored(module: nn.Module, ignored: set[nn.Parameter]) -> bool:
    params = list(module.parameters())
    return bool(params) and not list(module.buffers()) and all(param in ignored for param in params)


def managed_params(modules: Iterable[nn.Module], ignored: set[nn.Parameter]) -> dict[nn.Parameter, str]:
    """The parameters that ``modules`` hold themselves and the names they have there, each once."""
    found: dict[nn.Parameter, str] = {}
    for module in modules:
        for name, param in module.named_parameters(recurse=False):
            if param not in ignored:
                found.setdefault(param, name)
    return found


def owners_of(params: Iterable[nn.Parameter], roots: Iterable[nn.Module]) -> dict[nn.Parameter, list[Owner]]:
    """Every place in ``roots`` where each of ``params`` is registered: several for shared parameters and modules."""
    owners: dict[nn.Parameter, list[Owner]] = {param: [] for param in params}
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    for module in modules:
        for name, param in module._parameters.items():
            if param is not None and param in owners:
                owners[param].append(Owner(module, name))
    return owners


def check_params(params: dict[nn.Parameter, str], device: torch.device) -> None:
    """Refuse what cannot be sharded, before anything is changed."""
    for param, name in params.items():
        if isinstance(param, DTensor):
            kind = param.device_mesh.device_type
            if kind != device.type:
                raise ValueError(
                    "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                    f"{kind} for DTensor and {device.type} for FSDP, in parameter {name}"
                )
        if param.ndim == 0:
            raise ValueError(
                f"fully_shard doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal to 1."
            )
        if not param.is_contiguous():
            raise NotImplementedError(
                f"FSDP does not support non-contiguous parameters yet: {name} has size {tuple(param.size())} and "
                f"stride {param.stride()}"
            )


def move_to_device(modules: Iterable[nn.Module], params: Iterable[nn.Parameter], device: torch.device) -> None:
    """Move ``params``, and the buffers that ``modules`` hold, to ``device``; what is on the meta device stays there."""
    buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    for tensor in dict.fromkeys([*params, *buffers]):
        if tensor.device == device or tensor.is_meta:
            continue
        if is_wrapper_subclass(tensor):
            with torch.no_grad():  # autograd would hold a reference, which swapping does not allow
                moved = nn.Parameter(tensor.to(device), requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)
        else:
            tensor.data = tensor.to(device)


# As torch's, whose decorator gives the function this attribute: the state of a module, for tools; ``None`` for others.
setattr(fully_shard, "state", unit_of)  # noqa: B010 - a function has no such attribute for a type checker
