"""Tensors inside whatever a module may take or return: tuples, lists, dicts, namedtuples, dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``, in a fixed order; anything else is passed over."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in _parts(value):
            yield from tensors_of(part)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` rebuilt with every tensor replaced by ``function`` of it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        rebuilt: Any = type(value)
        return rebuilt({key: map_tensors(function, part) for key, part in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, part) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, part) for part in value)
    if _is_dataclass(value):
        changed = {f.name: map_tensors(function, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changed)
    return value


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (tuple, list)):
        yield from value
    elif _is_dataclass(value):
        yield from (getattr(value, field.name) for field in dataclasses.fields(value))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
