"""Results of the baseline and the oracle that a rank process keeps for later cases.

Cases that differ only in how a model is sharded, and the implementations of one run, have the same baseline and the
same oracle. A result is kept as bytes, so that no case can change it and no census of tensors counts it.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch

from shardproof.harness.tensors.memory import raw_bytes
from shardproof.harness.tensors.trees import map_leaves, map_tensors, tensors_of

#: The bytes of the results that a rank keeps; the least recently used are dropped first.
_MOST_BYTES = 64 << 20

#: One in so many results that are found is computed again and compared.
_RECOMPUTED = 20

_ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the bytes of a packed result."""

    start: int
    stop: int
    shape: torch.Size
    dtype: torch.dtype


class Packed:
    """An immutable copy of a container of tensors, as :func:`map_tensors` handles it.

    Args:
        value: the container; its tensors are plain and need no gradients.
    """

    def __init__(self, value: Any) -> None:
        parts: list[bytes] = []
        self.size = 0

        def pack(tensor: torch.Tensor) -> Any:
            data = raw_bytes(tensor)
            padding = bytes(-len(data) % _ALIGNMENT)
            place = _Place(self.size, self.size + len(data), tensor.shape, tensor.dtype)
            parts.extend((data, padding))
            self.size += len(data) + len(padding)
            return place

        self._skeleton = map_tensors(pack, value)
        self._data = b"".join(parts)

    def unpack(self) -> Any:
        """Return a new copy of the container, with all tensors on the host."""
        data = torch.frombuffer(bytearray(self._data or b"\0"), dtype=torch.uint8)

        def unpack(place: _Place) -> torch.Tensor:
            return data[place.start : place.stop].view(place.dtype).view(place.shape)

        return map_leaves(unpack, self._skeleton, kind=_Place)


class ReplayCache:
    """Packed results by key, the same on every rank of a world as long as their versions are equal.

    Attributes:
        version: the number of results that were ever put in.
    """

    def __init__(self) -> None:
        self.version = 0
        self._results: collections.OrderedDict[bytes, Packed] = collections.OrderedDict()
        self._bytes = 0
        self._found = 0

    def get(self, key: bytes) -> Packed | None:
        """Return the result of a key, or None."""
        if (found := self._results.get(key)) is not None:
            self._results.move_to_end(key)
            self._found += 1
        return found

    @property
    def is_due(self) -> bool:
        """Whether the result that was found last is to be computed again and compared."""
        return self._found % _RECOMPUTED == 0

    def put(self, key: bytes, result: Any) -> None:
        """Keep a result; drop the least recently used ones if there are too many bytes."""
        packed = Packed(result)
        self.version += 1
        self._results[key] = packed
        self._bytes += packed.size
        while self._bytes > _MOST_BYTES:
            self._bytes -= self._results.popitem(last=False)[1].size

    def clear(self, *, version: int) -> None:
        """Drop all results, and continue with a version."""
        self._results.clear()
        self._bytes, self.version = 0, version


def is_equal(one: Any, other: Any) -> bool:
    """Whether two containers have the same tensors, bit for bit."""
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(first.dtype == second.dtype and raw_bytes(first) == raw_bytes(second) for first, second in pairs)
