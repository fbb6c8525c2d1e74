"""Notes the collectives that the methods of ``ProcessGroup`` issue; what is issued below Python is not seen."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from shardproof.harness.collectives.announce import METHODS, collective_of
from shardproof.harness.collectives.trace import Collective

#: Kinds whose two sides differ, or that have no tensors.
_NOT_NOTED = frozenset({"send", "recv", "barrier"})


@contextlib.contextmanager
def noted(note: Callable[[Collective], None]) -> Iterator[None]:
    """Call ``note`` with each collective, before it is issued."""
    before: dict[str, Any] = {}
    depth = [0]  # torch implements old names of methods with new ones: of nested calls the outermost is a collective

    def noting(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def issue(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if depth[0] == 0:
                note(collective_of(group, kind, args, kwargs))
            depth[0] += 1
            try:
                return method(group, *args, **kwargs)
            finally:
                depth[0] -= 1

        return issue

    made: dict[str, Any] = {}
    for kind, names in METHODS.items():
        for name in names:
            method = getattr(dist.ProcessGroup, name, None)
            if method is not None and kind not in _NOT_NOTED:
                before[name], made[name] = method, noting(method, kind)
                setattr(dist.ProcessGroup, name, made[name])
    try:
        yield
    finally:
        for name, method in before.items():
            if getattr(dist.ProcessGroup, name) is made[name]:
                setattr(dist.ProcessGroup, name, method)
