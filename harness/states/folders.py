"""Names of files in a folder: those that an index names, and those of the ranks of one state."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from shardproof.door import BadFile

MOST_FILES = 1 << 16
"""Files of a folder."""

_RANK = re.compile(r"(?<=rank)[-_.]?(\d+)", re.IGNORECASE)
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
    """Return files by their names without the number in which they differ, and each by this number, that of its rank.

    Names with "rank" may differ in the numbers that follow it, and others in any; those that differ in no number or in
    several are by themselves.
    """
    alike: dict[tuple[re.Pattern[str], str], list[Path]] = {}
    for path in paths:
        pattern = _RANK if _RANK.search(path.name) else _NUMBER
        alike.setdefault((pattern, pattern.sub("*", path.name)), []).append(path)
    found: dict[str, dict[int, Path]] = {}
    for (pattern, stem), group in alike.items():
        numbers = [[int(one) for one in pattern.findall(path.name)] for path in group]
        differing = [values for values in zip(*numbers, strict=True) if len(set(values)) > 1]
        if len(differing) == 1 and len(set(differing[0])) == len(group):
            found[stem] = dict(sorted(zip(differing[0], group, strict=True)))
        else:
            found |= {path.name: {0: path} for path in group}
    return found


def rank_of(name: str) -> int | None:
    """Return the rank that the name of a file has; None if it has none or several numbers of ranks."""
    found = _RANK.findall(name)
    return int(found[0]) if len(found) == 1 else None


def names_a_rank(path: Path) -> bool:
    """Whether the name of a file has the number of a rank."""
    return _RANK.search(path.name) is not None


def stem_of(family: str) -> str:
    """Return what tells the files of one family from those of others: a short name without ranks."""
    stem = PurePosixPath(family).stem
    return re.sub(r"[-_.]*(world[-_]?size[-_]?\d+[-_.]*)?(rank)?\*", "", stem, flags=re.IGNORECASE) or stem
