"""Which modules inside a module are wrapped, and which parameters and buffers each wrapper is about."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_impl.common.containers import cast, map_tensors
from fsdp_impl.common.owner import Owner
from fsdp_impl.flat.options import Ignored
from fsdp_impl.flat.registry import clean, unit_of, units_in, wrappers
from fsdp_impl.flat.shards import is_managed

# What a policy chooses: modules to wrap, each with the arguments for its wrapper.
Targets = dict[nn.Module, dict[str, Any]]


def find_ignored(module: nn.Module, modules: Any, states: Any) -> Ignored:
    """What a wrapper of ``module`` leaves alone: what its arguments name, and what wrappers inside it leave alone.

    ``modules`` are its ``ignored_modules``, ``states`` its ``ignored_states``: parameters or modules, not both.
    """
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
    if any(unit_of(root) is not None for root in roots):
        raise ValueError("`ignored_modules` should not include FSDP modules")
    found = {child for root in roots for child in root.modules() if unit_of(child) is None}
    if module in found:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
            f"parameters being ignored and is not well-supported: {module}",
            stacklevel=4,
        )
    own = {param for child in found for param in child.parameters() if not is_managed(param)}
    own.update(param for param in params if not is_managed(param))
    for unit in units_in(module):
        found.update(unit.options.ignored.modules)
        own.update(unit.options.ignored.params)
    return Ignored(frozenset(found), frozenset(own))


def managed_modules(module: nn.Module) -> dict[nn.Module, str]:
    """The modules in ``module`` and their names, but those that are inside another wrapper."""
    inside = {child for wrapper, _ in wrappers(module) for child in wrapper.modules()}
    return {child: name for name, child in module.named_modules() if child not in inside}


def managed_params(module: nn.Module, ignored: Ignored) -> tuple[dict[nn.Parameter, list[Owner]], list[str]]:
    """The parameters that a wrapper of ``module`` takes, with all places where each is registered, and their names."""
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


# Policies


def wrap_inner(
    module: nn.Module, wrapper: Callable[..., nn.Module], arguments: dict[str, Any], policy: Any, ignored: Ignored
) -> None:
    """Replace the modules inside ``module`` that ``policy`` names by wrappers of them, innermost first."""
    for name, child in module.named_modules():
        if unit_of(child) is not None:
            raise ValueError(
                f"FSDP auto wrapping requires modules to not already have FSDP applied but found {name} in\n{module}"
            )
    if hasattr(policy, "_run_policy"):
        targets = policy._run_policy(module, ignored.modules, dict(arguments))
    else:
        targets = _run_callable(module, policy, arguments, ignored)
    _leave_out_of_mixed_precision(module, arguments, targets, ignored)
    if hasattr(policy, "_run_policy"):
        _check_frozen(module, targets, ignored, use_orig=arguments["use_orig_params"])
    _replace(module, wrapper, targets)


def _replace(module: nn.Module, wrapper: Callable[..., nn.Module], targets: Targets) -> None:
    replacements: dict[nn.Module, nn.Module] = {}

    def visit(parent: nn.Module) -> None:
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if child not in seen:
                seen.add(child)
                visit(child)
                if child in targets:
                    replacements[child] = wrapper(child, **targets[child])
            if child in replacements:
                setattr(parent, name, replacements[child])

    seen = {module}
    visit(module)


def _run_callable(
    module: nn.Module, policy: Callable[..., bool], arguments: dict[str, Any], ignored: Ignored
) -> Targets:
    """Call ``policy`` with each module, children first, and the number of elements that no child's wrapper takes.

    A module inside which it does not want to look is not wrapped either.
    """
    targets: Targets = {}
    # By modules, which may be in several places: the parameters in each that wrappers take.
    known: dict[nn.Module, set[nn.Parameter]] = {}

    def visit(current: nn.Module, *, is_root: bool) -> set[nn.Parameter]:
        """The parameters in ``current`` that wrappers inside it, or itself, take."""
        params = {param for param in current.parameters() if param not in ignored.params}
        if not policy(module=current, recurse=True, nonwrapped_numel=_numel(params)):
            return set()
        taken: set[nn.Parameter] = set()
        for child in current.children():
            if child not in ignored.modules:
                if child not in known:
                    known[child] = visit(child, is_root=False)
                taken |= known[child]
        if not is_root and policy(module=current, recurse=False, nonwrapped_numel=_numel(params - taken)):
            targets[current] = dict(arguments)
            return params
        return taken

    visit(module, is_root=True)
    return targets


def _numel(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


def _leave_out_of_mixed_precision(
    module: nn.Module, arguments: dict[str, Any], targets: Targets, ignored: Ignored
) -> None:
    """Make units of modules that need full precision, and cast at their borders."""
    precision = arguments["mixed_precision"]
    if precision is None:
        return
    classes = tuple(precision._module_classes_to_ignore)
    found = [child for child in module.modules() if isinstance(child, classes) and child not in ignored.modules]
    for child in found:
        targets[child] = {**targets.get(child, arguments), "mixed_precision": None}
        casts = _FloatInside()
        child.register_forward_pre_hook(casts.before, with_kwargs=True)
        child.register_forward_hook(casts.after)
    if found:
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the wrapped module has "
            f"submodules of type:\n{ {type(child) for child in found} }\nThese modules will be wrapped as separate "
            "FSDP instances with mixed precision disabled. By default batch norm submodules will be wrapped as "
            "separate instances.",
            stacklevel=5,
        )


class _FloatInside:
    """Runs a module in float32 amid others that run in a lower precision."""

    def __init__(self) -> None:
        self._outside: torch.dtype | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._outside = None
        args, kwargs = map_tensors(self._widen, (args, kwargs))
        return args, kwargs

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self._outside is None else cast(self._outside, output)

    def _widen(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype == torch.float32:
            return tensor
        self._outside = tensor.dtype
        return tensor.float()


def _check_frozen(module: nn.Module, targets: Targets, ignored: Ignored, *, use_orig: bool) -> None:
    taken: set[torch.Tensor] = set()
    names = {param: clean(name) for name, param in module.named_parameters()}
    for path, child in _children_first("", module, set()):
        if child not in targets:
            continue
        params = [param for param in child.parameters() if param not in taken and param not in ignored.params]
        taken.update(params)
        trainable = [param for param in params if param.requires_grad]
        frozen = [param for param in params if not param.requires_grad]
        if trainable and frozen:
            _report_frozen(path, names, trainable, frozen, use_orig=use_orig)


def _children_first(path: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules in ``module`` but for ``seen`` ones, in the order of registration, each behind those in it."""
    seen.add(module)
    for name, child in module.named_children():
        if child not in seen:
            yield from _children_first(f"{path}.{name}" if path else name, child, seen)
    yield path, module


def _report_frozen(
    path: str,
    names: dict[nn.Parameter, str],
    trainable: Sequence[nn.Parameter],
    frozen: Sequence[nn.Parameter],
    *,
    use_orig: bool,
) -> None:
    message = f"{path} has both parameters with requires_grad=True and False."
    if use_orig:
        some, all_ = (sum(p.numel() for p in params) for params in (trainable, [*trainable, *frozen]))
        message += (
            " We do not recommend wrapping such modules since the gradient memory usage will be higher than expected "
            f"({all_} numel instead of {some} numel before sharding via reduce-scatter). "
        )
    else:
        message += " FSDP does not support wrapping such modules when use_orig_params=False. "
    message += (
        "If possible, wrap the frozen parameters with FSDP separately.\n"
        f"The following parameters have requires_grad=True:\n{[names[param] for param in trainable]}\n"
        f"The following parameters have requires_grad=False:\n{[names[param] for param in frozen]}"
    )
    if not use_orig:
        raise ValueError(message)
    warnings.warn(message, stacklevel=6)
