"""Policies for ``auto_wrap_policy``, and wrapping while a model is being made; as ``torch.distributed.fsdp.wrap``.

A policy is a callable ``policy(module=, recurse=, nonwrapped_numel=)``, asked twice about each module: with ``recurse``
whether to look at it and inside, and, after all inside has been decided, without it whether to wrap the module itself,
of which ``nonwrapped_numel`` elements are left. Or it is an object that names all modules to wrap at once
(``_run_policy``).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

# What `wrap` does inside `enable_wrap`: the class and its arguments.
_enabled: ContextVar[tuple[Any, dict[str, Any]] | None] = ContextVar("_enabled", default=None)


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap modules for which ``lambda_fn`` is true."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Wrap modules of the classes ``transformer_layer_cls``."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wrap modules with at least ``min_num_params`` elements that nothing inside them has taken.

    Args:
        force_leaf_modules: classes that are not wrapped, nor anything inside them; by default those in the function's
            attribute ``FORCE_LEAF_MODULES``, to which user code may add.
        exclude_wrap_modules: classes that are not wrapped themselves; by default those in ``EXCLUDE_WRAP_MODULES``.
    """
    if nonwrapped_numel < min_num_params:
        return False
    defaults: Any = size_based_auto_wrap_policy
    leaves = defaults.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = defaults.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return not isinstance(module, tuple(leaves if recurse else excluded))


# Attention reads its projection's weight without calling the projection.
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
# Containers have no forward to gather for.
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


class CustomPolicy:
    """Wrap the modules for which ``lambda_fn`` returns ``True`` or a dict of arguments that replace the wrapper's.

    Raises:
        ValueError: when it runs, if ``lambda_fn`` returns anything else.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        targets: dict[nn.Module, dict[str, Any]] = {}
        for module in root_module.modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ValueError(
                    "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned "
                    f"{answer}"
                )
            if answer:
                targets[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return targets


class ModuleWrapPolicy(CustomPolicy):
    """Wrap modules of the classes ``module_classes``."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        classes = tuple(set(module_classes))
        super().__init__(lambda module: isinstance(module, classes))
        self._classes = classes

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """As a callable policy, to be combined with others."""
        return recurse or isinstance(module, self._classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({set(self._classes)})"


@contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, :func:`wrap` wraps with ``wrapper_cls(module, **wrapper_kwargs)``.

    Raises:
        NotImplementedError: inside another such context.
    """
    if _enabled.get() is not None:
        raise NotImplementedError(
            "You are already within an autowrap context and we currently do not supported nested autowrap."
        )
    token = _enabled.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _enabled.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """``module``, wrapped if inside :func:`enable_wrap`; ``wrap_overrides`` take precedence over its arguments."""
    enabled = _enabled.get()
    if enabled is None:
        return module
    wrapper, kwargs = enabled
    wrapped: nn.Module = wrapper(module, **{**kwargs, **wrap_overrides})
    return wrapped
