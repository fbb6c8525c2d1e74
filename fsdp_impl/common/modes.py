"""Autograd off, for a question where it is off already: in backward it is, and a unit asks several times.

It is on in a backward with ``create_graph=True``, whose gradients are refused: a reduction would drop their graph.
Transforms of ``torch.func`` off likewise.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

from fsdp_impl.common.private import func_transform, outside_func, set_grad_enabled

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NOTHING = nullcontext()


class _Off:
    """Autograd, which is on, off; ``torch.no_grad()`` takes four times as long."""

    def __enter__(self) -> None:
        set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        set_grad_enabled(True)


_OFF = _Off()


def no_grad() -> AbstractContextManager[Any]:
    """``torch.no_grad()``."""
    return _OFF if torch.is_grad_enabled() else _NOTHING


def without_grad(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run ``fn`` under :func:`no_grad`."""

    @functools.wraps(fn)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        with _OFF:
            return fn(*args, **kwargs)

    return run


def without_func(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run ``fn``, which handles parameters and no activations, outside of the transforms of ``torch.func``.

    Inside, every tensor that is made belongs to the transform: it has no storage and ends with it.
    """

    @functools.wraps(fn)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if func_transform() is None:
            return fn(*args, **kwargs)
        with outside_func():
            return fn(*args, **kwargs)

    return run


def check_plain(grad: torch.Tensor, name: str) -> None:
    """Refuse, by a ``RuntimeError``, a gradient of the parameter, or the parameters, ``name`` that has a graph."""
    if grad.requires_grad:
        raise RuntimeError(
            f"FSDP does not support gradients of gradients, but backward(create_graph=True) made some for {name}"
        )
