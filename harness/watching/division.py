"""How a sampler divides a data set among ranks, and of which rows this is: what stands for them, on the host.

``__getitem__`` of the data set is not called, because it may draw random numbers: the indices of a Subset are read, and
lists and tensors that a data set has with as many rows as it has itself.
"""

from __future__ import annotations

import dataclasses
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from shardproof.harness.tensors.fingerprints import row_hashes

#: How many numbers stand for the rows of a table.
_KEPT = 256

#: The longest list or tensor that is read, how many of its rows, and how many elements of a row; the most indices.
_MOST_ROWS, _READ_ROWS, _READ_ELEMENTS, _MOST_INDICES = 1 << 18, 1 << 15, 64, 1 << 24

#: How many data sets are looked for in one another, and how deep a row of a list is.
_DEPTH, _DEPTH_OF_ROW = 4, 3

#: The fewest rows of data that are divided.
_FEWEST = 8

#: How many samplers are looked for in one another.
_MOST_WRAPPERS = 8

#: Names of the number of parts and of the own part that samplers have: torch's, and accelerate's.
_NAMES = (("num_replicas", "rank"), ("num_processes", "process_index"))

#: An odd factor and its modulus, which mix the numbers of rows.
_FACTOR, _MODULUS = 0x9E3779B1, 1 << 32


@dataclasses.dataclass(frozen=True)
class Division:
    """A data set that a sampler divides among several ranks.

    Attributes:
        kind: the names of the class of the data set and of the sampler.
        parts: among how many.
        part: the number of the one that this rank reads.
        rows: of the data set.
        indices: by the place of a Subset numbers for the rows that it has of its data set, the least of all.
        content: by the place of a list or tensor of different rows, which the rank has not drawn at random, numbers
            for these rows, the least of all.
        step: how many steps the leading optimizer had made at the first index.
    """

    kind: str
    parts: int
    part: int
    rows: int
    indices: dict[str, tuple[int, ...]]
    content: dict[str, tuple[int, ...]]
    step: int


def division_of(data: Any, sampler: Any, step: int) -> Division | None:
    """Return how a sampler, or one inside of it, divides a data set; None where it gives all rows."""
    for _ in range(_MOST_WRAPPERS):
        for names in _NAMES:
            parts, part = (getattr(sampler, name, None) for name in names)
            if isinstance(parts, int) and isinstance(part, int):
                if parts < 2 or len(data) < _FEWEST:
                    return None
                kind = f"{type(data).__name__}, {type(sampler).__name__}"
                indices, content = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
                _read(data, "", indices, content, 0)
                return Division(kind, parts, part, len(data), indices, content, step)
        sampler = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))
    return None


def _read(
    data: Any, place: str, indices: dict[str, tuple[int, ...]], content: dict[str, tuple[int, ...]], depth: int
) -> None:
    """Read what a data set has, and the data sets in it that have as many rows, or of which it is a Subset."""
    if depth > _DEPTH:
        return
    if isinstance(data, Subset):
        if len(data.indices) <= _MOST_INDICES:
            indices[place or "the Subset"] = _least(torch.as_tensor(list(data.indices), dtype=torch.int64))
        _read(data.dataset, f"{place}.dataset", indices, content, depth + 1)
        return
    for name, value in [("", data)] if isinstance(data, (list, tuple, torch.Tensor)) else _columns(data):
        if isinstance(value, Dataset):
            _read(value, f"{place}.{name}", indices, content, depth + 1)
        elif (
            _is_loaded(value) and (numbers := _numbers(value)) is not None and 2 * len(numbers.unique()) > len(numbers)
        ):
            content[f"{place}.{name}"] = _least(numbers)


def _columns(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a data set has with as many rows as it has, by the names of its attributes."""
    values = getattr(data, "__dict__", None)
    for name, value in list(values.items()) if isinstance(values, dict) else []:
        if name == "tensors" and isinstance(value, tuple):  # those of TensorDataset
            yield from ((f"{name}.{number}", one) for number, one in enumerate(value))
        elif _is_table(value) and _size_of(value) == len(data):
            yield name, value


def _is_table(value: Any) -> bool:
    return isinstance(value, (Dataset, list, tuple, torch.Tensor)) or _is_array(value)


def _is_loaded(value: Any) -> bool:
    """Whether rows are no drawn ones: lists with texts, and tensors that are a part of a larger one."""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and value.untyped_storage().nbytes() > value.numel() * value.element_size()
    if _is_array(value):
        return value.dtype.kind in "SU" or getattr(value.base, "nbytes", 0) > value.nbytes
    return bool(value) and _has_text(value[0], 0)


def _has_text(row: Any, depth: int) -> bool:
    inside = list(row.values()) if type(row) is dict else _inside(row)
    if inside is None or depth >= _DEPTH_OF_ROW:
        return isinstance(row, (str, bytes))
    return any(_has_text(one, depth + 1) for one in inside[:_READ_ELEMENTS])


def _size_of(value: Any) -> int:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return -1


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _least(numbers: torch.Tensor) -> tuple[int, ...]:
    """Return the least of mixed numbers, each once: sets that share rows share some of these."""
    mixed = (numbers % _MODULUS * _FACTOR) % _MODULUS
    return tuple(mixed.unique()[:_KEPT].tolist())


def _numbers(value: Any) -> torch.Tensor | None:
    """Return a number for each row, or for each of some of many; None where they cannot be read."""
    if not _FEWEST <= _size_of(value) <= _MOST_ROWS:
        return None
    some = value[:: -(-len(value) // _READ_ROWS)]
    if _is_array(some):
        some = torch.from_numpy(some) if some.dtype.kind in "biuf" and some.dtype.isnative else some.tolist()
    if isinstance(some, torch.Tensor):
        if type(some) is not torch.Tensor or some.device.type != "cpu" or some.layout is not torch.strided:
            return None
        rows = some.detach().reshape(len(some), -1)
        return row_hashes(rows[:, :: max(1, rows.shape[1] // _READ_ELEMENTS)])
    found = [_number(one, 0) for one in some]
    return None if None in found else torch.tensor(found, dtype=torch.int64)


def _number(row: Any, depth: int) -> int | None:
    """Return a number for a row of texts, numbers and tensors; None of anything else."""
    if isinstance(row, (str, bytes, int, float, type(None))):
        return zlib.crc32(repr(row).encode())
    if type(row) is torch.Tensor and row.device.type == "cpu" and row.layout is torch.strided and row.numel():
        flat = row.detach().reshape(-1)
        return zlib.crc32(
            flat[:: max(1, flat.numel() // _READ_ELEMENTS)].contiguous().view(torch.uint8).numpy().tobytes()
        )
    if _is_array(row) and row.dtype.kind in "biufSU":
        return zlib.crc32(row.tobytes())
    inside = _inside(row)
    if inside is None or depth >= _DEPTH_OF_ROW:
        return None
    numbers = [_number(one, depth + 1) for one in inside[: 2 * _READ_ELEMENTS]]
    return None if None in numbers else zlib.crc32(repr(numbers).encode())


def _inside(row: Any) -> Sequence[Any] | None:
    """Return what a list, a tuple or a dict has; None of anything else."""
    if isinstance(row, (list, tuple)):
        return row
    return [one for pair in row.items() for one in pair] if type(row) is dict else None
