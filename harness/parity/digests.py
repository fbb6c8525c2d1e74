"""Digests of models, batches and functions: equal digests mean equal results of a deterministic replay.

What cannot be digested safely has no digest: an object with state of its own, such as a counter in a hook or in a loss,
would not be updated by a replay that is taken from a cache.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import hashlib
import io
import marshal
import pickle
import types
from typing import Any

import torch
from torch import nn

from shardproof.harness.tensors.memory import raw_bytes

_BY_REFERENCE = (type, types.BuiltinFunctionType)
_BY_CONTENT = (nn.Module, functools.partial, torch.Size, torch.dtype, torch.device, enum.Enum, collections.OrderedDict)


def digest(value: Any) -> bytes | None:
    """Return a digest of everything that ``value`` consists of, or None if there is none.

    Args:
        value: modules, tensors, containers, dataclasses, partial functions, and functions without a closure; their code
            counts, and not what it refers to by global names.

    Returns:
        16 bytes, comparable within one process.
    """
    stream = io.BytesIO()
    try:
        _Digester(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return hashlib.blake2b(stream.getbuffer(), digest_size=16).digest()


class _Digester(pickle.Pickler):
    """Writes values so that equal ones have equal bytes; nothing reads the result."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple, (("tensor", *_contents(value)),)
        if isinstance(value, types.FunctionType):
            if value.__closure__:
                raise pickle.PicklingError(f"{value.__qualname__} has state of its own")
            name, code = (value.__module__, value.__qualname__), marshal.dumps(value.__code__)
            return tuple, (("function", name, code, value.__defaults__, value.__kwdefaults__),)
        if isinstance(value, (*_BY_REFERENCE, *_BY_CONTENT)) or dataclasses.is_dataclass(value):
            return NotImplemented
        raise pickle.PicklingError(f"{type(value).__name__} may have state of its own")


def _contents(tensor: torch.Tensor) -> tuple[Any, ...]:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise pickle.PicklingError(f"the memory of a {type(tensor).__name__} is not its own")
    kind = type(tensor), tuple(tensor.shape), str(tensor.dtype), str(tensor.device), tensor.requires_grad
    return *kind, raw_bytes(tensor)
