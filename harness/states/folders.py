"""Names of files in a folder: those that an index names, and those of the ranks of one state."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from shardproof.door import BadFile

MOST_FILES = 1 << 16
"""Files of a folder."""

_RANK = re.compile(r"(?<![A-Za-z])rank[-_.]?(\d+)(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")


def inside(folder: Path, name: str, index: str) -> Path:
    """Return a file of a folder that an index names.

    Raises:
        BadFile: the name leads out of the folder.
    """
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise BadFile(f"{folder / index}: it names the file {name[:200]!r}, which is not inside the folder: refused")
    return folder / path


def listed(folder: Path) -> list[Path]:
    """Return the files of a folder, in order, without those of folders in it.

    Raises:
        BadFile: it cannot be listed, or has too many.
    """
    found: list[Path] = []
    try:
        for path in folder.iterdir():
            found.append(path)
            if len(found) > MOST_FILES:
                raise BadFile(f"{folder}: it has more than {MOST_FILES} files")
    except OSError as error:
        raise BadFile(f"{folder}: {error.strerror or error}") from error
    return sorted(path for path in found if path.is_file())


def by_rank(paths: Sequence[Path]) -> Mapping[str, dict[int, Path]]:
    """Return files by their names without the number of a rank, and each by this number.

    The number is that which follows "rank"; in files without such a name, the one in which they differ.
    """
    found: dict[str, dict[int, Path]] = {}
    plain = []
    for path in paths:
        if ranks := [*_RANK.finditer(path.name)]:
            at = ranks[-1]
            family = path.name[: at.start(1)] + "*" + path.name[at.end(1) :]
            _put(found.setdefault(family, {}), int(at[1]), path)
        else:
            plain.append(path)
    for family, number, path in _numbered(plain) or [(path.name, 0, path) for path in plain]:
        _put(found.setdefault(family, {}), number, path)
    return found


def _numbered(paths: Sequence[Path]) -> list[tuple[str, int, Path]]:
    """Return the name without the number in which files differ, the number and the file; nothing of other files."""
    stems = {_NUMBER.sub("*", path.name) for path in paths}
    if len(paths) < 2 or len(stems) > 1:
        return []
    numbers = [_NUMBER.findall(path.name) for path in paths]
    places = [place for place, values in enumerate(zip(*numbers, strict=True)) if len(set(values)) > 1]
    stem = stems.pop()
    return (
        [(stem, int(one[places[0]]), path) for one, path in zip(numbers, paths, strict=True)]
        if len(places) == 1
        else []
    )


def _put(family: dict[int, Path], number: int, path: Path) -> None:
    if number in family:
        raise BadFile(f"{path}: {family[number].name} is of the same rank, {number}")
    family[number] = path


def names_a_rank(path: Path) -> bool:
    """Whether the name of a file has the number of a rank."""
    return _RANK.search(path.name) is not None


def stem_of(family: str) -> str:
    """Return what tells the files of one family from those of others: a short name without ranks."""
    stem = PurePosixPath(family).stem
    return re.sub(r"[-_.]*(world[-_]?size[-_]?\d+[-_.]*)?(rank[-_.]?)?\*", "", stem, flags=re.IGNORECASE) or stem
