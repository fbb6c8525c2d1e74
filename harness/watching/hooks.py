"""Hooks of a watch: an error of ours in one does not reach user code, and a copy of a module has none."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardproof.harness.tensors import private

_PEEK = "torch._C._functorch.peek_interpreter_stack"
_CLEAR = "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack"


def guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Let an error of ours in a hook end the watching, and not the training.

    What torch.func transforms is computed by the training alone: the hook computes as if it were outside of ``vmap()``.
    """

    @functools.wraps(hook)
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with outside_func():
                return hook(self, *args, **kwargs)
        except self._passes:
            raise
        except Exception as error:
            self._on_error(error)
            return None

    disabled: Callable[..., Any] = torch.compiler.disable(inner)
    return disabled


def quiet(method: Callable[..., None]) -> Callable[..., None]:
    """Let an error of ours be none of user code."""

    @functools.wraps(method)
    def inner(self: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(Exception):
            method(self, *args, **kwargs)

    disabled: Callable[..., None] = torch.compiler.disable(inner)
    return disabled


@functools.cache
def _transforms() -> tuple[Callable[[], Any] | None, Callable[[], Any] | None]:
    return private.find(_PEEK), private.find(_CLEAR)


def outside_func() -> contextlib.AbstractContextManager[Any]:
    """Compute as if outside of what torch.func transforms, for the time of the context."""
    peek, clear = _transforms()
    is_inside = peek is not None and peek() is not None
    return clear() if is_inside and clear is not None else contextlib.nullcontext()


class Hook:
    """A hook that a copy of its module, as of an EMA, does not have: it would be a copy of all that is watched."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In what is compiled it is nothing: a call would break the graph, which fullgraph=True refuses.
        if torch.compiler.is_compiling():
            return None
        return self._hook(*args, **kwargs)

    def __reduce__(self) -> tuple[type[Hook], tuple[Callable[..., Any]]]:
        return Hook, (_nothing,)


class Compiled:
    """A call of a module that is compiled in place, by ``module.compile()``, where hooks run that its graph has not.

    Args:
        before: is called with the module, its arguments and those by keyword.
        after: the same, with the output last.
    """

    def __init__(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any] | None = None) -> None:
        self._module = weakref.ref(module)
        self._call: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
        call, ref = self._call, self._module

        @functools.wraps(call)
        def seen(*args: Any, **kwargs: Any) -> Any:
            own = None if torch.compiler.is_compiling() else ref()
            if own is None:
                return call(*args, **kwargs)
            before(own, args, kwargs)
            output = None
            try:
                output = call(*args, **kwargs)
            finally:
                if after is not None:
                    after(own, args, kwargs, output)
            return output

        self._seen = module._compiled_call_impl = seen

    def remove(self) -> None:
        """Call it as before."""
        module = self._module()
        if module is not None and module._compiled_call_impl is self._seen:
            module._compiled_call_impl = self._call


def before_others(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> list[Any]:
    """Register a hook of a tensor's gradient before those that it has; return its handle, or nothing if it has none."""
    hooks: Any = tensor._backward_hooks
    if not hooks:
        return []
    handle = tensor.register_hook(hook)
    for key in [key for key in hooks if key != handle.id]:  # torch goes by the order in which they were put in
        hooks[key] = hooks.pop(key)
    return [handle]


def _nothing(*_: Any, **__: Any) -> None:
    """The hook of a module that was copied or saved while it was watched."""
