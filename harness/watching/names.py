"""The names of parameters in the model that user code built, whatever wraps its modules."""

import functools
import gc
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from shardproof.harness.tensors import private
from shardproof.harness.tensors.trees import tensors_of

_T = TypeVar("_T")

#: The attribute under which a wrapper keeps the module that it wraps, by the name of the wrapper's class.
_INNER = {
    "DistributedDataParallel": "module", "DataParallel": "module", "DeepSpeedEngine": "module",
    "_FabricModule": "_forward_module", "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod", "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}  # fmt: skip
_ATTRIBUTES = frozenset(_INNER.values())

#: The class of attention's output projection.
_UNCALLED = nn.modules.linear.NonDynamicallyQuantizableLinear

#: Normalizations whose buffers are running statistics of each rank's own data, or else synchronized by themselves.
_OF_RUNNING_STATISTICS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip

#: The elements of the largest buffer that is read.
_LARGEST_BUFFER = 1 << 20


def inner_of(module: nn.Module) -> nn.Module | None:
    """Return the module that a wrapper wraps, or None for a module that is no wrapper."""
    for kind in type(module).__mro__:
        if (name := _INNER.get(kind.__name__)) is not None and name in module._modules:
            return module._modules[name]
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the innermost module of a chain of wrappers."""
    while (inner := inner_of(module)) is not None:
        module = inner
    return module


def without_wrappers(name: str) -> str:
    """Return the name that a parameter has in the module that user code built."""
    return ".".join(part for part in name.split(".") if part not in _ATTRIBUTES)


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that user code has given a module: what ``fully_shard`` makes of it is a class of torch."""
    kinds: list[type[nn.Module]] = [one for one in type(module).__mro__ if issubclass(one, nn.Module)]
    return next(one for one in kinds if not issubclass(one, FSDPModule))


def is_wrapped(module: nn.Module) -> bool:
    """Whether something reduces the gradients of a root: a wrapper that it is, or units of FSDP2 in it."""
    kinds = ("DistributedDataParallel", "FullyShardedDataParallel")
    return any(kind.__name__ in kinds for kind in type(module).__mro__) or any(True for _ in _units_of(module))


def modules_of(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with its canonical name, and each place where it is used; a wrapper has its module's name."""

    def walk(name: str, module: nn.Module, above: frozenset[int]) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in above:
            return
        yield name, module
        inner = inner_of(module)
        for last, child in module._modules.items():
            if child is not None:
                own = name if child is inner else f"{name}.{last}" if name else last
                yield from walk(own, child, above | {id(module)})

    yield from walk("", root, frozenset())


def parameters_of(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter that modules have, under each of its canonical names.

    Of units of FSDP2 these are the sharded ones, which optimizers have, even while modules have gathered ones: after
    ``unshard()``, between forward and backward, and of the root from a forward without gradients on.
    """
    sharded = sharded_by_gathered(root)
    for name, module in modules_of(root):
        for last, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{name}.{last}" if name else last, sharded.get(id(parameter), parameter)


def buffers_of(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that modules of user code have, under each of their canonical names, but for large ones.

    Statistics of torch's own modules, such as BatchNorm, are of each rank's own data by design. A large buffer is a
    table or a cache, and takes time to read; a mask has no statistics.
    """
    for name, module in modules_of(root):
        if kind_of(module).__module__.startswith("torch.") or isinstance(module, _OF_RUNNING_STATISTICS):
            continue
        for last, buffer in module._buffers.items():
            if type(buffer) is torch.Tensor and buffer.dtype != torch.bool and 0 < buffer.numel() <= _LARGEST_BUFFER:
                yield f"{name}.{last}" if name else last, buffer


def attributes_of(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that are plain attributes of modules of user code, as masks may be, but for large ones.

    Flat parameters put views there, whose storage is freed after the forward.
    """
    for name, module in modules_of(root):
        if kind_of(module).__module__.startswith("torch."):
            continue
        for last, one in vars(module).items():
            if type(one) is not torch.Tensor or one.requires_grad or not one.is_floating_point():
                continue
            if 0 < one.numel() <= _LARGEST_BUFFER and (one.device.type == "meta" or one.untyped_storage().nbytes()):
                yield f"{name}.{last}" if name else last, one


def sharded_by_gathered(root: nn.Module) -> dict[int, nn.Parameter]:
    """Return the sharded parameters of FSDP2's units, by the id of what modules have in place of each for a time."""
    found: dict[int, nn.Parameter] = {}
    for group in _units_of(root):
        for one in group.fsdp_params:
            for gathered in ("_unsharded_param", "_sharded_post_forward_param"):
                if (value := getattr(one, gathered, None)) is not None:
                    found[id(value)] = one.sharded_param
    return found


def meshes_of_units(root: nn.Module) -> list[DeviceMesh]:
    """Return the meshes over which units of FSDP2 shard their parameters, or replicate them."""
    return list(dict.fromkeys(group.mesh_info.mesh for group in _units_of(root)))


def switched_off(root: nn.Module) -> tuple[str, ...]:
    """Return the calls that keep a backward pass from reducing gradients now, as user code writes them."""
    found = {"no_sync()": False, "set_requires_gradient_sync(False)": False, "set_requires_all_reduce(False)": False}
    for _, module in modules_of(root):
        if isinstance(module, DistributedDataParallel):
            found["no_sync()"] |= not module.require_backward_grad_sync
    for group in _units_of(root):
        found["set_requires_gradient_sync(False)"] |= not group.reduce_grads
        found["set_requires_all_reduce(False)"] |= group.reduce_grads and not group.all_reduce_grads
    return tuple(name for name, is_off in found.items() if is_off)


def _units_of(root: nn.Module) -> Iterator[Any]:
    """Yield what FSDP2 keeps of its units: groups of parameters that are gathered together."""
    if private.find("torch.distributed.fsdp.FSDPModule._get_fsdp_state") is None:
        return
    for unit in root.modules():
        if isinstance(unit, FSDPModule):
            state: Any = unit._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            # torch 2.11 has one at most.
            yield from (state._fsdp_param_group,) * (state._fsdp_param_group is not None) if groups is None else groups


def objects_of(kind: type[_T]) -> list[_T]:
    """Return the objects of the process that are of a class."""
    # Not by isinstance, which asks proxies of dead objects.
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def is_compiled(module: nn.Module) -> bool:
    """Whether the forward of a module runs compiled; its hooks would be traced, and would change what is compiled."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def compiled_in_place() -> list[nn.Module]:
    """Return the modules of the process that were compiled by ``module.compile()``."""
    return [one for one in objects_of(nn.Module) if vars(one).get("_compiled_call_impl") is not None]


def compiles() -> bool:
    """Whether this process has compiled something: a function that is compiled runs no hooks of modules in it."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(getattr(dynamo, "counters", {}).get("stats", {}).get("unique_graphs"))


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its prefix."""
    return str(dtype).removeprefix("torch.")


def as_list(value: Any) -> list[Any]:
    """Return what an argument names, none, one or several, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def device_of(inputs: Any) -> str:
    """Return the type of the device of the first tensor of inputs; "cpu" without one."""
    return next((tensor.device.type for tensor in tensors_of(inputs)), "cpu")


@functools.cache
def _wrapping() -> tuple[Callable[[torch.Tensor], bool] | None, Callable[[torch.Tensor], torch.Tensor] | None]:
    names = ("is_functorch_wrapped_tensor", "get_unwrapped")
    is_wrapped, unwrap = (private.find(f"torch._C._functorch.{name}") for name in names)
    return is_wrapped, unwrap


def untransformed(value: Any) -> Any:
    """Return what a tensor of one of torch.func's transforms wraps; anything else is returned itself."""
    is_wrapped, unwrap = _wrapping()
    while is_wrapped is not None and unwrap is not None and isinstance(value, torch.Tensor) and is_wrapped(value):
        value = unwrap(value)
    return value


def readable_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, but those that live in one of torch.func's transforms alone."""
    return (one for one in tensors_of(value) if untransformed(one) is one)


def is_its_own(value: torch.Tensor | None) -> bool:
    """Whether what a module has as a parameter is one, or FSDP1's view of a flat one.

    Else user code computes with other tensors under the names of parameters, as ``functional_call()`` does.
    """
    if value is None or isinstance(value, nn.Parameter):
        return value is not None
    return value._base is not None and value._base.is_leaf


def is_view(value: torch.Tensor) -> bool:
    """Whether a tensor is a view that can be used: one of an earlier forward may not even be asked."""
    try:
        return not value.is_leaf
    except RuntimeError:
        return False


def number_of(value: Any) -> float | None:
    """Return a number; None where a rank has a part of it, as of a norm that is still to be reduced."""
    if not is_whole(value):
        return None
    if isinstance(value, DTensor):
        value = value.to_local()
    return None if value is None else float(value)


def is_whole(value: Any) -> bool:
    """Whether a rank has all of a number: torch 2.9 returns total norms of DTensors before it reduces them."""
    return not isinstance(value, DTensor) or all(isinstance(one, Replicate) for one in value.placements)


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward, and is not attention's output projection, whose weight is used without it."""
    return type(module).forward is not nn.Module.forward and type(module) is not _UNCALLED


def without_turn(
    roots: Sequence[nn.Module], seen: Collection[int], called: Mapping[int, bool]
) -> tuple[list[str], list[str]]:
    """Return the parameters of modules that were not called, and of those that were with gradients disabled alone.

    Args:
        seen: the ids of modules whose forwards are seen.
        called: by id of a module that was called, whether it was with gradients enabled.
    """
    found = set[str](), set[str]()
    for root in roots:
        parents = {id(child): module for _, module in modules_of(root) for child in module.children()}
        for name, module in modules_of(root):
            mine = [f"{name}.{last}" if name else last for last in module._parameters]
            # Lists of parameters have no forward, and attention uses its projection without calling it.
            while id(module) in parents and not is_called(module):
                module = parents[id(module)]
            if id(module) in seen and not called.get(id(module)):
                found[id(module) in called].update(mine)
    return sorted(found[0]), sorted(found[1])


def replaced_in(roots: Sequence[nn.Module]) -> tuple[list[str], int]:
    """Return the parameters that have replaced those which DDP was made with, and how many of these are gone."""
    replaced: list[str] = []
    gone = 0
    for root in roots:
        for name, module in modules_of(root):
            if not isinstance(module, DistributedDataParallel) or not hasattr(module, "_module_parameters"):
                continue
            live = {id(one): (last, one) for last, one in parameters_of(module)}
            made = {id(one) for one in module._module_parameters}
            gone += len(made - live.keys())
            new = [last for key, (last, one) in live.items() if key not in made and one.requires_grad]
            replaced += [f"{name}.{last}" if name else last for last in new if last not in module.parameters_to_ignore]
    return replaced, gone


def tied_in(roots: Sequence[nn.Module]) -> list[tuple[str, ...]]:
    """Return the sets of names that are one parameter."""
    by_tensor: dict[int, list[str]] = {}
    for root in roots:
        for name, parameter in parameters_of(root):
            by_tensor.setdefault(id(parameter), []).append(name)
    return sorted(tuple(dict.fromkeys(names)) for names in by_tensor.values() if len(set(names)) > 1)
