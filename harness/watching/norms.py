"""Sees the calls of torch's functions that compute and apply total norms, updates of loss scalers, and the end.

``clip_grad_norm_`` calls two functions of its module by their private names. They are observed under these, because
user code has often imported the public ones before anything can be observed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from shardproof.harness.tensors import private

OnNorm = Callable[[str, Any, float | None, float], None]
"""Takes the name of the function, the total norm, what it clips to and the type of the norm."""

_TOTAL, _CLIP = (f"torch.nn.utils.clip_grad.{name}" for name in ("_get_total_norm", "_clip_grads_with_norm_"))


#: Those who observe now. The functions are replaced once for all of them: of two replacements, one inside of the other,
#: the outer one alone could be taken back.
_observers: list[tuple[OnNorm, Callable[[], None], Callable[[], None]]] = []
_replacements = contextlib.ExitStack()


@contextlib.contextmanager
def observed(on_norm: OnNorm, on_update: Callable[[], None], on_destroy: Callable[[], None]) -> Iterator[None]:
    """Call ``on_norm`` after each call of the functions, and the others beside what they are for.

    ``on_update`` is called after each update of a scaler, and ``on_destroy`` before process groups are destroyed.
    """
    if not _observers:
        _replace_all()
    observer = on_norm, on_update, on_destroy
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
        if not _observers:
            _replacements.close()


def _replace_all() -> None:
    total, clip = private.find(_TOTAL), private.find(_CLIP)
    if total is not None:
        public = "torch.nn.utils.clip_grad.get_total_norm"
        for path in (_TOTAL, public, "torch.nn.utils.get_total_norm"):
            _replacements.enter_context(_replaced(path, _after_total(total)))
    if clip is not None:
        public = "torch.nn.utils.clip_grad.clip_grads_with_norm_"
        for path in (_CLIP, public, "torch.nn.utils.clip_grads_with_norm_"):
            _replacements.enter_context(_replaced(path, _after_clip(clip)))
    _replacements.enter_context(_after_update())
    destroy = dist.destroy_process_group
    for path in ("torch.distributed.destroy_process_group", f"{destroy.__module__}.destroy_process_group"):
        _replacements.enter_context(_replaced(path, _before(destroy)))


def _on_norm(*call: Any) -> None:
    for on_norm, _, _ in list(_observers):
        on_norm(*call)


def _after_total(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        value = function(tensors, norm_type, *args, **kwargs)
        _on_norm("get_total_norm", value, None, float(norm_type))
        return value

    return get_total_norm


def _after_clip(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        _on_norm("clip_grads_with_norm_", total_norm, float(max_norm), 2.0)
        return function(parameters, max_norm, total_norm, *args, **kwargs)

    return clip_grads_with_norm_


def _before(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def destroy_process_group(group: Any = None) -> None:
        for _, _, on_destroy in list(_observers) if group is None else ():
            on_destroy()
        function(group)

    return destroy_process_group


@contextlib.contextmanager
def _replaced(path: str, value: Any) -> Iterator[None]:
    owner, _, name = path.rpartition(".")
    module = __import__("importlib").import_module(owner)
    before = getattr(module, name, None)
    if before is None:
        yield
        return
    setattr(module, name, value)
    try:
        yield
    finally:
        if getattr(module, name) is value:
            setattr(module, name, before)


@contextlib.contextmanager
def _after_update() -> Iterator[None]:
    before = torch.amp.GradScaler.update

    @functools.wraps(before)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = before(self, *args, **kwargs)
        for _, on_update, _ in list(_observers):
            on_update()
        return result

    torch.amp.GradScaler.update = update  # type: ignore[method-assign]
    try:
        yield
    finally:
        if torch.amp.GradScaler.update is update:
            torch.amp.GradScaler.update = before  # type: ignore[method-assign]
