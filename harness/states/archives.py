"""Files of ``torch.save``: archives of zip with a pickle and the bytes of each storage, which are read one by one.

The directory of an archive has at most :data:`MOST_OF_A_DIRECTORY` bytes, and each of its members is stored as it is:
nothing is decompressed. The bytes of a storage are a private mapping of the file.
"""

import functools
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardproof import door
from shardproof.door import BadFile
from shardproof.harness.states import names, pickles
from shardproof.harness.states.names import Storage, StorageKind, View
from shardproof.harness.states.pickles import PickleError

MOST_OF_A_DIRECTORY = 1 << 26
"""Bytes of the list of an archive's members, of which each tensor has about 70."""

_END, _END64, _LOCATOR64 = 22, 56, 20
_MOST_OF_A_COMMENT = 1 << 16
_HEADER = 30
_MEMBER = struct.Struct("<4s6H3I5H2I")
_BIG, _BIGGER = 0xFFFFFFFF, 0xFFFF

LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How a file of torch.save began before torch 1.6."""


class _Stored(NamedTuple):
    """A member: the position of its header, its bytes, its CRC-32, and whether they are stored as they are."""

    start: int
    size: int
    crc: int
    is_plain: bool


@dataclass(frozen=True)
class Archive:
    """An archive, which may be a part of a file.

    Attributes:
        path: the file.
        base: the position of its first byte in the file.
        size: its bytes.
    """

    path: Path
    base: int
    size: int

    def fail(self, message: str) -> BadFile:
        """Return the error of this file."""
        where = f": the part at byte {self.base}" if self.base else ""
        return BadFile(f"{self.path}{where}: {message}")

    def state(self) -> Any:
        """Return what the archive has: plain values, containers, records, and views, which stand for tensors.

        Raises:
            BadFile: the archive is damaged, beyond a bound, or asks for what is not allowed.
        """
        try:
            return self._state()
        except (PickleError, struct.error) as error:
            raise self.fail(str(error)) from error

    def _state(self) -> Any:
        members = self._members()
        roots = [name.removesuffix("/data.pkl") for name in members if name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise PickleError("an archive of zip without the one data.pkl of torch.save")
        root = roots[0]
        if any(name in members for name in (f"{root}/constants.pkl", f"{root}/bytecode.pkl")):
            raise PickleError("a model of TorchScript, which has code; save its state_dict() by torch.save")
        if (order := members.get(f"{root}/byteorder")) and bytes(self._content(order, "byteorder")) == b"big":
            raise PickleError("it has the bytes of its numbers in the order of big-endian machines")
        member = members[f"{root}/data.pkl"]
        if member.size > pickles.MOST_BYTES:
            raise PickleError(f"its pickle has more than {pickles.MOST_BYTES >> 20} MiB")
        data = self._content(member, "data.pkl")
        if zlib.crc32(data) != member.crc:
            raise PickleError("its data.pkl is damaged: the check sum is another")
        return pickles.loads(data, names.find, functools.partial(self._storage, root, members))

    def _storage(self, root: str, members: dict[str, _Stored], found: Any) -> Storage:
        """Return the storage of a persistent id."""
        if type(found) is not tuple or len(found) != 5 or found[0] != "storage" or not isinstance(found[2], str):
            raise PickleError("it has a persistent id that is no storage of torch: refused")
        _, kind, key, _, numel = found
        if not isinstance(kind, StorageKind) or type(numel) is not int or numel < 0:
            raise PickleError("it has a persistent id that is no storage of torch: refused")
        size, member = numel * kind.dtype.itemsize, members.get(f"{root}/data/{key}")
        if member is None:
            raise PickleError(f"the storage data/{key} is missing")
        if not member.is_plain:
            raise PickleError(f"the storage data/{key} is compressed, which torch.save does not do")
        if member.size < size:
            raise PickleError(f"the storage data/{key} has {member.size} bytes, and its tensors need {size}")
        return Storage(key, kind.dtype, size, member.start)

    def load(self, view: View) -> torch.Tensor:
        """Return the values of a view of :meth:`state`, read now.

        Raises:
            BadFile: the file is cut off, or the view has no elements in it.
        """
        try:
            return values(view, self._bytes)
        except (PickleError, struct.error) as error:
            raise self.fail(str(error)) from error

    def _bytes(self, storage: Storage, start: int, size: int) -> memoryview:
        return self._piece(self._begin(storage.start) + start, size)

    def _begin(self, header: int) -> int:
        """Return the position of the first byte of a member."""
        found = bytes(self._piece(header, _HEADER))
        if found[:4] != b"PK\x03\x04":
            raise PickleError(f"its directory names a member at {header}, where there is none")
        named, extra = struct.unpack("<2H", found[26:30])
        return header + _HEADER + int(named) + int(extra)

    def _piece(self, start: int, size: int) -> memoryview:
        if start + size > self.size:
            raise PickleError(f"it is cut off: it has {self.size} bytes, and {start + size} are needed")
        return door.piece(self.path, self.base + start, size)

    def _content(self, member: _Stored, name: str) -> memoryview:
        if not member.is_plain:
            raise PickleError(f"its {name} is compressed, which torch.save does not do")
        return self._piece(self._begin(member.start), member.size)

    # The directory

    def _members(self) -> dict[str, _Stored]:
        count, start, size = self._directory()
        if size > MOST_OF_A_DIRECTORY:
            raise PickleError(f"the list of its members has more than {MOST_OF_A_DIRECTORY >> 20} MiB")
        data, at, found = bytes(self._piece(start, size)), 0, dict[str, _Stored]()
        for _ in range(count):
            if data[at : at + 4] != b"PK\x01\x02":
                raise PickleError("the list of its members is damaged")
            name, member, at = _member(data, at)
            if name in found:
                raise PickleError(f"it has two members of the name {name[:200]}")
            found[name] = member
        return found

    def _directory(self) -> tuple[int, int, int]:
        """Return how many members there are, and the position and the bytes of their list."""
        length = min(self.size, _END + _MOST_OF_A_COMMENT)
        tail = bytes(self._piece(self.size - length, length))
        at = tail.rfind(b"PK\x05\x06")
        if at < 0 or len(tail) - at < _END:
            raise PickleError("it is cut off or damaged: the list of its members is missing")
        count, size, start = struct.unpack("<H2I", tail[at + 10 : at + 20])
        before = self.size - length + at - _LOCATOR64
        if before >= 0 and (locator := bytes(self._piece(before, _LOCATOR64)))[:4] == b"PK\x06\x07":
            end = bytes(self._piece(struct.unpack("<Q", locator[8:16])[0], _END64))
            if end[:4] != b"PK\x06\x06":
                raise PickleError("the list of its members is damaged")
            count, size, start = struct.unpack("<3Q", end[32:56])
        if count > size // _MEMBER.size:
            raise PickleError("the list of its members is damaged")
        return count, start, size


def _member(data: bytes, at: int) -> tuple[str, _Stored, int]:
    """Return the name of a member in a directory, the member, and the position of the next."""
    (_, _, _, flags, method, _, _, crc, packed, size, named, extra, said, _, _, _, start) = _MEMBER.unpack_from(
        data, at
    )
    at += _MEMBER.size
    name = data[at : at + named].decode("utf-8", "backslashreplace")
    more, at = data[at + named : at + named + extra], at + named + extra + said
    while len(more) >= 4:  # the larger numbers of zip64, of those that do not fit
        kind, length = struct.unpack("<2H", more[:4])
        if kind == 1:
            wide = iter(struct.unpack(f"<{length // 8}Q", more[4 : 4 + length // 8 * 8]))
            size, packed, start = (next(wide, one) if one == _BIG else one for one in (size, packed, start))
        more = more[4 + length :]
    return name, _Stored(start, size, crc, method == 0 and not flags & 1 and packed == size), at


# Values -----------------------------------------------------------------------------------------------------------


def values(view: View, read: Any) -> torch.Tensor:
    """Return the values of a view.

    Args:
        view: its elements are known to lie within its storage.
        read: returns bytes of a storage, of which the first position and the number are given.
    """
    if view.storage is None:
        raise PickleError("a tensor on the device meta has no elements")
    if not math.prod(view.shape):
        return torch.empty(view.shape, dtype=view.dtype)
    item = view.dtype.itemsize
    count = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride, strict=True))
    start = view.offset * item
    if isinstance(view.storage, bytes):
        data = memoryview(bytearray(view.storage[start : start + count * item]))
    else:
        data = read(view.storage, start, count * item)
    found = tensor_of(data, view.dtype, count).as_strided(view.shape, view.stride)
    if "conj" in view.bits:
        found = found.conj().resolve_conj()
    return found.neg() if "neg" in view.bits else found


def tensor_of(data: memoryview, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return a tensor of so many elements over a buffer; a copy of one that begins between two places of the dtype."""
    found = torch.frombuffer(data, dtype=torch.uint8, count=count * dtype.itemsize)
    return (found if found.data_ptr() % dtype.itemsize == 0 else found.clone()).view(dtype)
