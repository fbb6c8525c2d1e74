"""Folders of ``torch.distributed.checkpoint``: ``.metadata``, and files in which parts of tensors follow each other.

Each part is an archive of its own (``archives.py``), opened when its values are read; bytes are read at once.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardproof import door
from shardproof.door import BadFile
from shardproof.harness.states import boxes, names, pickles
from shardproof.harness.states.archives import Archive
from shardproof.harness.states.entries import MOST_ENTRIES, Entry, StoredPart, entries_of
from shardproof.harness.states.folders import inside
from shardproof.harness.states.names import View, is_kind, positions
from shardproof.harness.states.pickles import PickleError, Record, UnknownName

METADATA = ".metadata"

_Places = dict[tuple[str, tuple[int, ...] | None], Record]


def read(folder: Path) -> Iterator[Entry]:
    """Yield the entries of a checkpoint.

    Raises:
        BadFile: the metadata cannot be read, or a file that they name is missing or too short.
    """
    path = folder / METADATA
    metadata = _metadata(path)
    try:
        yield from _Reader(folder, _places(metadata.get("storage_data"))).entries(metadata.get("state_dict_metadata"))
    except PickleError as error:
        raise BadFile(f"{path}: {error}") from error


def _metadata(path: Path) -> Record:
    size = door.size_of(path)
    if size > pickles.MOST_BYTES:
        raise BadFile(f"{path}: a pickle of more than {pickles.MOST_BYTES >> 20} MiB")
    try:
        found = pickles.loads(door.piece(path, 0, size), names.find, _no_storage)
    except PickleError as error:
        raise BadFile(f"{path}: {error}") from error
    if not is_kind(found, "Metadata"):
        raise BadFile(f"{path}: not the metadata of a torch.distributed.checkpoint")
    return found


def _no_storage(found: Any) -> Any:
    raise PickleError("it has a persistent id: refused")


def _places(storage_data: Any) -> _Places:
    """Return where each part lies, by the name of its entry and its offsets."""
    found: _Places = {}
    for index, info in storage_data.items() if isinstance(storage_data, dict) else ():
        if is_kind(index, "MetadataIndex") and is_kind(info, "_StorageInfo") and isinstance(index.get("fqn"), str):
            offset = index.get("offset")
            found[index.get("fqn"), None if offset is None else positions(offset, "offset")] = info
    return found


class _Reader:
    """Reads the entries of a folder; remembers how long its files are."""

    def __init__(self, folder: Path, places: _Places) -> None:
        self._folder = folder
        self._places = places
        self._sizes: dict[str, int] = {}

    def entries(self, described: Any) -> Iterator[Entry]:
        if not isinstance(described, dict) or len(described) > MOST_ENTRIES:
            raise PickleError(f"it describes no entries, or more than {MOST_ENTRIES}")
        for name, told in described.items():
            if is_kind(told, "TensorStorageMetadata") and isinstance(name, str):
                yield self._tensor(name, told)
            elif is_kind(told, "BytesStorageMetadata") and isinstance(name, str):
                yield from self._bytes(name)
            else:
                raise PickleError(f"it describes {str(name)[:200]} by something else than a tensor or bytes")

    def _tensor(self, name: str, told: Record) -> Entry:
        shape = positions(told.get("size"), "shape")
        properties = told.get("properties")
        state = properties.state if is_kind(properties, "TensorProperties") else None
        dtype = state[0] if type(state) is tuple and state else properties and properties.get("dtype")
        if not isinstance(dtype, torch.dtype):
            raise PickleError(f"it describes {name[:200]} without a dtype")
        parts = []
        for chunk in names.sequence(told.get("chunks")):
            if not is_kind(chunk, "ChunkStorageMetadata"):
                raise PickleError(f"it describes a part of {name[:200]} by something else than a chunk")
            box, offsets = boxes.block(shape, chunk.get("offsets"), chunk.get("sizes")), tuple(chunk.get("offsets"))
            archive = self._archive(name, offsets)
            load = _Load(archive, name, tuple(chunk.get("sizes")), dtype)
            parts.append(StoredPart(box, load, door.printable(archive.path.name)))
        return Entry(name, shape, dtype, tuple(parts))

    def _bytes(self, name: str) -> Iterator[Entry]:
        archive = self._archive(name, None)
        try:
            found = [*entries_of(archive.state(), archive, door.printable(archive.path.name), name)]
        except BadFile as error:
            if not isinstance(error.__cause__, UnknownName):
                raise
            found = [Entry(name, None, None, unread=str(error))]
        yield from found

    def _archive(self, name: str, offsets: tuple[int, ...] | None) -> Archive:
        info = self._places.get((name, offsets))
        of = "" if offsets is None else f" at {offsets}"
        if info is None:
            raise PickleError(f"it does not say in which file {name[:200]}{of} lies")
        relative, start, size = (info.get(field) for field in ("relative_path", "offset", "length"))
        if info.get("transform_descriptors"):
            raise PickleError(f"{name[:200]}{of} was transformed when it was written, as compressed or encrypted")
        if not isinstance(relative, str):
            raise PickleError(f"it does not say in which file {name[:200]}{of} lies")
        start, size = positions([start, size], "offset")
        path = inside(self._folder, relative, METADATA)
        if relative not in self._sizes:
            self._sizes[relative] = door.size_of(path)
        if start + size > self._sizes[relative]:
            raise BadFile(
                f"{path}: it is cut off: {name[:200]}{of} lies at bytes {start} to {start + size}, and it has "
                f"{self._sizes[relative]}"
            )
        return Archive(path, start, size)


@dataclasses.dataclass(frozen=True)
class _Load:
    """What reads the values of a chunk."""

    archive: Archive
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self) -> torch.Tensor:
        view = self.archive.state()
        if not isinstance(view, View) or view.shape != self.shape or view.dtype != self.dtype:
            said = f"a tensor of shape {view.shape} and {view.dtype}" if isinstance(view, View) else "no tensor"
            raise self.archive.fail(f"{said}, where {METADATA} has {self.name[:200]} of {self.shape} and {self.dtype}")
        return self.archive.load(view)
