"""Find the parameters and buffers that one wrapper is about."""

import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_impl.common.owner import Owner
from fsdp_impl.flat.names import clean
from fsdp_impl.flat.shards import is_managed

if TYPE_CHECKING:
    from fsdp_impl.flat.module import FullyShardedDataParallel


class Ignored:
    """What a wrapper leaves alone: what it was told to, and what wrappers inside it were.

    Args:
        module: the module to wrap.
        modules: ``ignored_modules``.
        states: ``ignored_states``: parameters or modules, not both.

    Attributes:
        modules: with all modules inside them.
        params: theirs, and the parameters given.

    Raises:
        ValueError: if both arguments are given, ``states`` mixes parameters and modules (or holds other things), or a
            module has been wrapped.
        TypeError: if ``modules`` cannot be iterated over.
    """

    def __init__(self, module: nn.Module, modules: Any, states: Any) -> None:
        if modules is not None and states is not None:
            raise ValueError(
                "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
            )
        params: list[nn.Parameter] = []
        roots: list[nn.Module] = []
        if states is not None:
            params, roots = _split_states(_as_list(states, "ignored_states"))
        elif modules is not None:
            roots = _as_list(modules, "ignored_modules")
            if not all(isinstance(root, nn.Module) for root in roots):
                raise ValueError(f"ignored_modules expects nn.Module list elements but got types {_types(roots)}")
        inner = list(wrappers(module))
        if any(isinstance(root, _wrapper_class()) for root in roots):
            raise ValueError("`ignored_modules` should not include FSDP modules")
        self.modules = {child for root in roots for child in root.modules() if not isinstance(child, _wrapper_class())}
        if module in self.modules:
            warnings.warn(
                "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
                f"parameters being ignored and is not well-supported: {module}",
                stacklevel=4,
            )
        self.params = {param for child in self.modules for param in child.parameters() if not is_managed(param)}
        self.params.update(param for param in params if not is_managed(param))
        for wrapper in inner:
            self.modules.update(wrapper._ignored.modules)
            self.params.update(wrapper._ignored.params)

    def buffers(self) -> set[torch.Tensor]:
        return {buffer for module in self.modules for buffer in module.buffers()}


def wrappers(module: nn.Module) -> Iterator["FullyShardedDataParallel"]:
    """The wrappers in ``module``, itself included."""
    for inner in module.modules():
        if isinstance(inner, _wrapper_class()):
            yield inner


def managed_modules(module: nn.Module) -> dict[nn.Module, str]:
    """The modules in ``module`` and their names, but those that are inside another wrapper."""
    inside = {child for wrapper in wrappers(module) for child in wrapper.modules()}
    return {child: name for name, child in module.named_modules() if child not in inside}


def managed_params(module: nn.Module, ignored: Ignored) -> tuple[dict[nn.Parameter, list[Owner]], list[str]]:
    """The parameters that a wrapper of ``module`` takes, with all places where each is registered, and their names.

    Raises:
        ValueError: if one is managed by another unit too.
    """
    owners: dict[nn.Parameter, list[Owner]] = {}
    names: list[str] = []
    for child, prefix in managed_modules(module).items():
        for name, param in child._parameters.items():
            if param is None or param in ignored.params:
                continue
            full = clean(f"{prefix}.{name}" if prefix else name)
            if is_managed(param):
                raise ValueError(
                    f"Parameter '{full}' is shared with a parameter that another FSDP unit manages. Wrap the modules "
                    "that share it together, or leave them to the unit around them."
                )
            if param not in owners:
                names.append(full)
            owners.setdefault(param, []).append(Owner(child, name))
    return owners, names


def unmanaged_params(module: nn.Module, ignored: Ignored) -> Iterator[nn.Parameter]:
    """The parameters of :func:`managed_params`, without asking where they are."""
    seen: set[nn.Parameter] = set()
    for child in managed_modules(module):
        for param in child.parameters(recurse=False):
            if param not in ignored.params and param not in seen and not is_managed(param):
                seen.add(param)
                yield param


def _split_states(states: list[Any]) -> tuple[list[nn.Parameter], list[nn.Module]]:
    if all(isinstance(state, nn.Parameter) for state in states):
        return states, []
    if all(isinstance(state, nn.Module) for state in states):
        return [], states
    raise ValueError(
        "ignored_states expects all nn.Parameter or all nn.Module list elements but got types " + _types(states)
    )


def _as_list(value: Iterable[Any], name: str) -> list[Any]:
    try:
        return list(value)
    except TypeError as error:
        raise TypeError(f"`{name}` should be an iterable of `torch.nn.Module`s but got {type(value)}") from error


def _types(values: Iterable[Any]) -> str:
    return str(sorted({type(value) for value in values}, key=repr))


def _wrapper_class() -> type["FullyShardedDataParallel"]:
    from fsdp_impl.flat.module import FullyShardedDataParallel

    return FullyShardedDataParallel
