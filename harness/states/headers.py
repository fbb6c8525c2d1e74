"""Files of safetensors: a header of JSON, which says where the bytes of each tensor lie, and no code.

The header is read within the bounds of any file of JSON (``door.py``). The library safetensors is not needed.
"""

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardproof import door
from shardproof.door import BadFile
from shardproof.harness.states import names
from shardproof.harness.states.archives import tensor_of
from shardproof.harness.states.entries import MOST_ENTRIES, Entry, StoredPart
from shardproof.harness.states.pickles import PickleError
from shardproof.harness.tensors.fingerprints import Box
from shardproof.jsonfiles import RecordError, kind_of

_LENGTH = 8
_METADATA = "__metadata__"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip


def entries_of(path: Path, source: str) -> Iterator[Entry]:
    """Yield the entries of a file, in the order of their bytes.

    Raises:
        BadFile: the file cannot be read, or its header is wrong.
    """
    try:
        yield from _entries(path, source)
    except BadFile:
        raise
    except RecordError as error:
        raise BadFile(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}: not a file of safetensors: {error}") from error


def _entries(path: Path, source: str) -> Iterator[Entry]:
    size = door.size_of(path)
    length = int.from_bytes(door.piece(path, 0, _LENGTH), "little")
    if length > min(size - _LENGTH, door.MOST_BYTES):
        raise RecordError(f"not a file of safetensors, or cut off: a header of {length} bytes, and the file has {size}")
    header = kind_of(door.parse_json(bytes(door.piece(path, _LENGTH, length)), once=True), dict, "the header")
    if len(header) > MOST_ENTRIES:
        raise RecordError(f"it has more than {MOST_ENTRIES} entries")
    found, begin, end = [], _LENGTH + length, 0
    for name, told in header.items():
        if _is_empty(told):
            yield Entry(name, (0,), torch.uint8)
        elif name != _METADATA:
            found.append((*_described(name, told), name))
    for start, stop, dtype, shape, name in sorted(found, key=lambda one: one[:2]):
        if start != end or begin + stop > size:
            why = (
                "overlap others" if start < end else "follow a gap" if start > end else f"pass its end, {size - begin}"
            )
            raise RecordError(f"the bytes {start} to {stop} of {name[:200]} {why}")
        end = stop
        part = StoredPart(Box(shape), functools.partial(_load, path, begin + start, dtype, shape), source)
        yield Entry(name, shape, dtype, (part,))
    if begin + end != size:
        raise RecordError(f"it has {size - begin - end} bytes after its last tensor")


def _is_empty(told: Any) -> bool:
    """Whether an entry has no bytes and no dtype, as a writer leaves it that was given a name and no tensor."""
    return isinstance(told, dict) and told.get("dtype") == "" and told.get("data_offsets") == [0, 0]


def _described(name: str, told: Any) -> tuple[int, int, torch.dtype, tuple[int, ...]]:
    where = f"the header: {name[:200]}"
    fields = kind_of(told, dict, where)
    kind = kind_of(fields.get("dtype"), str, f"{where}: dtype")
    if kind not in _DTYPES:
        raise RecordError(f"{where}: the dtype {kind[:20]} is not supported")
    try:
        shape, offsets = (
            names.positions(fields.get("shape"), "shape"),
            names.positions(fields.get("data_offsets"), "offset"),
        )
    except PickleError as error:
        raise RecordError(f"{where}: {error}") from error
    if len(offsets) != 2:
        raise RecordError(f"{where}: the offsets are not two")
    if offsets[1] - offsets[0] != (size := math.prod(shape) * _DTYPES[kind].itemsize):
        raise RecordError(f"{where}: {offsets[1] - offsets[0]} bytes, and a tensor of this shape and dtype has {size}")
    return offsets[0], offsets[1], _DTYPES[kind], shape


def _load(path: Path, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return tensor_of(door.piece(path, start, count * dtype.itemsize), dtype, count).view(shape)
