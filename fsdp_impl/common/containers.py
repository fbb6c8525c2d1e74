"""Walk the tensors of a forward's inputs and outputs, whatever they are packed in."""

import copy
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch

# Deeper than any real output; shallow enough to end a cycle with a clear message instead of a RecursionError.
_MAX_DEPTH = 100


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any, _depth: int = 0) -> Any:
    """Replace every tensor ``t`` in ``value`` by ``fn(t)``, in a fixed order.

    Walks dicts, tuples, named tuples, lists and dataclasses, nested; sets and other objects are returned as they are.
    A container is rebuilt (same type, by shallow copy) only if something inside was replaced, so a caller that shares
    one keeps it unchanged. A ``RuntimeError`` if they nest deeper than 100, as a container that holds itself does.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if _depth >= _MAX_DEPTH:
        raise RuntimeError(f"a {type(value).__name__} is nested {_MAX_DEPTH} containers deep: does it hold itself?")

    # dict before dataclass: a class that is both (an output class of a model library) keeps its keys and its
    # attributes in step when an item is set, not when an attribute is.
    if isinstance(value, dict):
        return _rebuild_dict(value, {key: map_tensors(fn, item, _depth + 1) for key, item in value.items()})
    if isinstance(value, (tuple, list)):
        # A tensor is asked here: a call for each would add up, as each unit walks its inputs twice.
        items = [fn(item) if isinstance(item, torch.Tensor) else map_tensors(fn, item, _depth + 1) for item in value]
        return _rebuild_sequence(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return _rebuild_dataclass(value, {name: map_tensors(fn, getattr(value, name), _depth + 1) for name in names})
    return value


def tensors_requiring_grad(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value`` that require grad, in the order of :func:`map_tensors`, repeated where they repeat."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    found: list[torch.Tensor] = []

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(visit, value)
    return found


def cast(dtype: torch.dtype, value: Any) -> Any:
    """Cast the floating-point tensors in ``value`` to ``dtype``; differentiable."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def _rebuild_dict(old: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    if not items:
        return old  # the keywords of nearly all forwards
    changed = {key: item for key, item in items.items() if item is not old[key]}
    if not changed:
        return old
    new = copy.copy(old)
    for key, item in changed.items():
        new[key] = item
    return new


def _rebuild_sequence(old: Any, items: list[Any]) -> Any:
    if all(map(operator.is_, items, old)):
        return old
    if hasattr(old, "_fields"):
        return type(old)._make(items)
    if isinstance(old, list):
        new = copy.copy(old)
        new[:] = items
        return new
    return type(old)(items)


def _rebuild_dataclass(old: Any, items: dict[str, Any]) -> Any:
    changed = {name: item for name, item in items.items() if item is not getattr(old, name)}
    if not changed:
        return old
    # A shallow copy, not dataclasses.replace: that would run __init__ and __post_init__ again, and refuse fields
    # with init=False.
    new = copy.copy(old)
    for name, item in changed.items():
        object.__setattr__(new, name, item)
    return new
