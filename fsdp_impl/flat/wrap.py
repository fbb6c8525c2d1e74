"""Wrap modules inside a module, as a policy says."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_impl.common.containers import cast, map_tensors
from fsdp_impl.flat import collect
from fsdp_impl.flat.collect import Ignored
from fsdp_impl.flat.names import clean

# What a policy chooses: modules to wrap, each with the arguments for its wrapper.
Targets = dict[nn.Module, dict[str, Any]]


def wrap_inner(
    module: nn.Module, wrapper: Callable[..., nn.Module], arguments: dict[str, Any], policy: Any, ignored: Ignored
) -> None:
    """Replace the modules inside ``module`` that ``policy`` names by wrappers of them, innermost first.

    Raises:
        ValueError: if there is a wrapper already, or a unit would have frozen parameters beside trainable ones and
            ``use_orig_params`` is not set.
    """
    for name, child in module.named_modules():
        if isinstance(child, collect._wrapper_class()):
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
    """Ask ``policy`` about each module, children first, with the number of elements that no child's wrapper takes."""
    targets: Targets = {}

    def visit(current: nn.Module, *, is_root: bool) -> int:
        """The number of elements in ``current`` that wrappers inside it, or itself, take."""
        numel = _numel(current, ignored)
        taken = 0
        if policy(module=current, recurse=True, nonwrapped_numel=numel):
            for child in current.children():
                if child not in ignored.modules and child not in seen:
                    seen.add(child)
                    taken += visit(child, is_root=False)
        rest = numel - taken
        if not is_root and policy(module=current, recurse=False, nonwrapped_numel=rest):
            targets[current] = dict(arguments)
            return numel
        return taken

    seen = {module}
    visit(module, is_root=True)
    return targets


def _numel(module: nn.Module, ignored: Ignored) -> int:
    return sum(param.numel() for param in module.parameters() if param not in ignored.params)


def _leave_out_of_mixed_precision(
    module: nn.Module, arguments: dict[str, Any], targets: Targets, ignored: Ignored
) -> None:
    """Make units of modules that do not bear a low precision, and cast at their borders."""
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
    for child, path in reversed([(child, path) for path, child in module.named_modules()]):
        if child not in targets:
            continue
        params = [param for param in child.parameters() if param not in taken and param not in ignored.params]
        taken.update(params)
        trainable = [param for param in params if param.requires_grad]
        frozen = [param for param in params if not param.requires_grad]
        if trainable and frozen:
            _report_frozen(path, names, trainable, frozen, use_orig=use_orig)


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
