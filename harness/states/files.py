"""Reads the state that a file or folder of a checkpoint has; loads no tensor and executes nothing.

Formats, by content: files of ``torch.save`` (``archives.py``), safetensors (``headers.py``), folders of Hugging Face
with one or several files of these, of ``torch.distributed.checkpoint`` (``checkpoints.py``), and with a file of each
rank (``ranks.py``). No file outside of the folder is read that an index names; links are followed.

A pickle has at most 64 MiB and 4,194,304 objects (``pickles.py``), a header or an index is JSON within the bounds of
``door.py``, a state has at most 1,048,576 entries, 64 levels deep; so a hostile file takes less than 3 GB. The values
of a part are mapped when they are read: they take memory for as long as they are used, and no more than the part has.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from shardproof import door
from shardproof.door import BadFile
from shardproof.harness.states import archives, checkpoints, entries, folders, headers, ranks
from shardproof.harness.states.archives import Archive
from shardproof.harness.states.entries import Entry, StoredPart
from shardproof.jsonfiles import kind_of

__all__ = ["Entry", "Part", "read"]

Part = StoredPart

READABLE = (
    "a file of torch.save or safetensors, or a folder of torch.distributed.checkpoint (with .metadata), of Hugging "
    "Face (model.safetensors, pytorch_model.bin, adapter_model.safetensors or an index of them), or with a file of "
    "torch.save of each rank"
)

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_SAFE = ".safetensors"
_INDEX = ".index.json"

#: Files of Hugging Face's models, of which the first that is there is read; each line is another model.
_MODELS = (
    ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin"),
    ("adapter_model.safetensors", "adapter_model.bin"),
)
#: Files of a trainer of theirs, whose entries begin with the file's name; the others have classes of the trainer.
_OF_TRAINERS = re.compile(r"(optimizer|scheduler)(_\d+)?\.(pt|bin)|rng_state(_\d+)?\.pth")


def read(path: str | os.PathLike[str]) -> list[Entry]:
    """Return the entries of a state, in their order in the files.

    Raises:
        BadFile: the path has none of the formats, or something is wrong with it, in one line.
    """
    found = Path(path)
    return _folder(found) if found.is_dir() else _file(found)


def has_trainer(path: str | os.PathLike[str]) -> bool:
    """Whether it is a folder that has files of a trainer: an optimizer, a scheduler or states of generators."""
    found = Path(path)
    return found.is_dir() and any(_OF_TRAINERS.fullmatch(one.name) for one in folders.listed(found))


def _file(path: Path, prefix: str = "") -> list[Entry]:
    size, source = door.size_of(path), door.printable(path.name)
    head = bytes(door.piece(path, 0, min(size, 512)))
    if head.startswith(b"PK"):
        archive = Archive(path, 0, size)
        return list(entries.entries_of(archive.state(), archive, source, prefix))
    if head.startswith(archives.LEGACY) or head[257:262] == b"ustar":
        raise BadFile(
            f"{path}: a file of torch.save before torch 1.6; convert it where you trust it: "
            "torch.save(torch.load(old, weights_only=True), new)"
        )
    if head[8:9] == b"{":
        return list(headers.entries_of(path, source))
    if head.startswith(b"\x80"):
        raise BadFile(f"{path}: a plain pickle, which has no tensors by themselves; save the state by torch.save")
    raise BadFile(f"{path}: {'an empty file' if not size else 'no state'}; read can be {READABLE}")


def _folder(folder: Path) -> list[Entry]:
    files = {path.name: path for path in folders.listed(folder)}
    if checkpoints.METADATA in files:
        return list(checkpoints.read(folder))
    if chosen := _chosen(files):
        found = _together(folder, (one for path in chosen for one in _model(folder, path)))
        trainers = (path for name, path in files.items() if _OF_TRAINERS.fullmatch(name))
        return found + [entry for path in trainers for entry in _file(path, path.stem)]
    return _of_ranks(folder, [path for name, path in files.items() if name.endswith(_TORCH)])


def _chosen(files: Mapping[str, Path]) -> list[Path]:
    """Return the files of Hugging Face's models; of a folder without them all indexes, or all files, of safetensors."""
    models = [[files[name] for name in names if name in files][:1] for names in _MODELS]
    return (
        [path for one in models for path in one]
        or [path for name, path in files.items() if name.endswith(_SAFE + _INDEX)]
        or [path for name, path in files.items() if name.endswith(_SAFE)]
    )


def _model(folder: Path, path: Path) -> Iterator[tuple[str, Entry]]:
    """Yield the entries of a file, or of those that an index names, each with the name of its file."""
    if not path.name.endswith(_INDEX):
        yield from ((path.name, entry) for entry in _file(path))
        return
    places = door.load(path, _places)
    names = dict.fromkeys(places.values())
    if len(names) > folders.MOST_FILES:
        raise BadFile(f"{path}: it names more than {folders.MOST_FILES} files")
    there: set[tuple[str, str]] = set()
    for name in names:
        file = folders.inside(folder, name, path.name)
        if not file.exists():
            raise BadFile(f"{path}: it names the file {name}, which is missing")
        for entry in _file(file):
            there.add((name, entry.name))
            yield name, entry
    if missing := [name for name, file in places.items() if (file, name) not in there]:
        raise BadFile(f"{path}: it names {missing[0][:200]}, which {places[missing[0]]} does not have")


def _places(data: object) -> Mapping[str, str]:
    """Return the file of each entry that an index names."""
    names = kind_of(kind_of(data, dict, "the index").get("weight_map"), dict, "weight_map")
    return {name: kind_of(file, str, f"weight_map.{name[:200]}") for name, file in names.items()}


def _together(folder: Path, found: Iterable[tuple[str, Entry]]) -> list[Entry]:
    """Return the entries of several files, of which no two may have one name."""
    files: dict[str, str] = {}
    kept: list[Entry] = []
    for file, entry in found:
        if entry.name in files:
            raise BadFile(f"{folder}: {entry.name[:200]} is in {files[entry.name]} and in {file}")
        if len(kept) == entries.MOST_ENTRIES:
            raise BadFile(f"{folder}: it has more than {entries.MOST_ENTRIES} entries")
        files[entry.name] = file
        kept.append(entry)
    return kept


def _of_ranks(folder: Path, paths: list[Path]) -> list[Entry]:
    if not paths:
        raise BadFile(f"{folder}: no state; read can be {READABLE}")
    families = folders.by_rank(paths)
    found: list[Entry] = []
    for family, files in families.items():
        prefix = "" if len(families) == 1 else folders.stem_of(family)
        if len(files) == 1:
            found += _file(next(iter(files.values())), prefix)
            continue
        ranks.check(folder, files)
        states: dict[int, list[Entry]] = {}
        for number, path in files.items():
            states[number] = _file(path, prefix)
            if sum(map(len, states.values())) > 4 * entries.MOST_ENTRIES:
                raise BadFile(f"{folder}: it has more than {4 * entries.MOST_ENTRIES} entries")
        found += ranks.joined(folder, files, states)
    return found
