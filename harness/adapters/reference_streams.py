"""Streams and events that are not there, for the reference implementation in a simulated world."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsdp_impl.common import streams


class _Stream:
    """Orders nothing."""


class _Event:
    """Never happens by itself: what waits for it is kept until it is waited for."""

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return False


_CURRENT = _Stream()


@contextlib.contextmanager
def as_on_a_device() -> Iterator[None]:
    """Put stand-ins in the place of streams and events; buffers then live as long as on a device."""

    def create(device: torch.device, *, priority: int = 0) -> Any:
        return _Stream()

    replaced: dict[str, Any] = {
        "create": create,
        "current": lambda device: _CURRENT,
        "use": lambda stream: contextlib.nullcontext(),
        "record": lambda stream: None if stream is None else _Event(),
        "wait": lambda stream, event: None,
        "join": lambda stream, other: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, function in replaced.items():
            patch.setattr(streams, name, function)
        yield
