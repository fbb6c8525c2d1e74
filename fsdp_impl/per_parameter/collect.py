"""Find the modules, parameters and buffers that one ``fully_shard`` call is about."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_impl.common.owner import Owner
from fsdp_impl.per_parameter.registry import unit_of


def outermost(modules: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """``modules`` without those that are inside another of them, and without repeats."""
    inside = {inner for module in modules for inner in module.modules() if inner is not module}
    return tuple(dict.fromkeys(module for module in modules if module not in inside))


def managed_modules(roots: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[nn.Module]:
    """The modules in ``roots`` but those that belong to another unit or to ``replicate``, children before parents.

    Nor those of which everything is ``ignored``.
    """
    found: dict[nn.Module, None] = {}
    visited: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        foreign = "replicate" in (_get_registry(module) or ())
        if module in visited or foreign or (module not in roots and unit_of(module) is not None):
            return
        visited.add(module)
        for child in module.children():
            visit(child)
        if not _is_ignored(module, ignored):
            found.setdefault(module)

    for root in roots:
        visit(root)
    return list(found)


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
    """Refuse what cannot be sharded, before anything is changed.

    Raises:
        ValueError: for scalars, and for DTensors on a mesh of another device type.
        NotImplementedError: for parameters that are not contiguous.
    """
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
        if is_traceable_wrapper_subclass(tensor):
            with torch.no_grad():  # autograd would hold a reference, which swapping does not allow
                moved = nn.Parameter(tensor.to(device), requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)
        else:
            tensor.data = tensor.to(device)
