"""Views of one buffer that were given out, so that adding to the buffer adds to all of them."""

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch


class Views(NamedTuple):
    """Where views lie in their buffer. Nothing here keeps its memory: it is free when all who have a view drop it.

    Attributes:
        given: the views, each with its address.
        start: where the buffer begins in its storage, in elements.
        numel: its size in elements.
    """

    given: tuple[tuple[weakref.ref[torch.Tensor], int], ...]
    start: int
    numel: int

    def whole(self, now: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
        """The buffer (1-D), if ``now`` are these very views and still lie in it; there must be as many."""
        first = None
        for tensor, (made, address) in zip(now, self.given, strict=True):
            # The same object may have other data by now: `param.grad.data = ...`.
            if tensor is None or tensor is not made() or tensor.data_ptr() != address:
                return None
            first = tensor if first is None else first
        return None if first is None else first.as_strided((self.numel,), (1,), self.start)


def remember(buffer: torch.Tensor, views: Sequence[torch.Tensor]) -> Views:
    """Remember ``views`` of ``buffer`` (1-D)."""
    given = tuple([(weakref.ref(view), view.data_ptr()) for view in views])
    return Views(given, int(buffer.storage_offset()), buffer.numel())
