"""Files that each rank has written of one state, put together by the names of their entries."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from shardproof.door import BadFile, printable
from shardproof.harness.states.entries import Entry
from shardproof.harness.states.folders import names_a_rank


def check(folder: Path, files: Mapping[int, Path]) -> None:
    """Check that the files are those of ranks 0 and on.

    Raises:
        BadFile: one is missing.
    """
    missing = [number for number in range(min(len(files), max(files)) + 1) if number not in files]
    if missing and missing[0] < max(files):
        names = f"{files[min(files)].name} and {files[max(files)].name}"
        raise BadFile(f"{folder}: it has {names}, and no file of rank {missing[0]}; name one file if they are no ranks")


def joined(folder: Path, files: Mapping[int, Path], states: Mapping[int, list[Entry]]) -> list[Entry]:
    """Return the entries of all ranks: parts of one tensor together, and a value once if all ranks have the same.

    Tensors of one name that differ in shape or dtype, and values that differ, are entries of their own, whose names end
    with that of their file.

    Raises:
        BadFile: nothing shows that the files are those of ranks.
    """
    by_name: dict[str, dict[int, Entry]] = {}
    for number in sorted(states):
        for entry in states[number]:
            by_name.setdefault(entry.name, {})[number] = entry
    is_sharded = any(not part.box.is_full for entries in states.values() for entry in entries for part in entry.parts)
    if not is_sharded and not all(map(names_a_rank, files.values())):
        first, last = files[min(files)].name, files[max(files)].name
        raise BadFile(
            f"{folder}: {first} to {last} differ in a number, and neither their names nor their tensors say that it "
            f"is a rank; name one file"
        )
    found: list[Entry] = []
    for name, entries in by_name.items():
        ones = list(entries.values())
        if len({(one.shape, one.dtype, repr(one.value), one.unread) for one in ones}) == 1:
            found.append(dataclasses.replace(ones[0], parts=tuple(part for one in ones for part in one.parts)))
        else:
            found += [
                dataclasses.replace(one, name=f"{name} ({printable(files[number].name)})", tied="")
                for number, one in entries.items()
            ]
    return found
