"""Changes that somebody has written down, as ``{"id", "file", "old", "new", "what"}`` in a list of JSON."""

from __future__ import annotations

import itertools
import json
import pathlib
from typing import Any

from sweeping.changes import Change, statement_at


def read_changes(path: pathlib.Path, folder: pathlib.Path) -> list[Change]:
    """The changes of a file.

    Args:
        path: the file of JSON. ``file`` begins with the name of ``folder``, ``old`` occurs once in that file, ``id`` is
            the change's name, and ``what`` says what it breaks; further keys are left alone.
        folder: the folder of the sources.

    Raises:
        ValueError: a change is not of this form, or does not fit the sources.
    """
    try:
        written = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(written, list) or not all(isinstance(each, dict) for each in written):
        raise ValueError(f"{path} must be a list of objects")
    return [_change(each, f"{path}, change {number}", folder) for number, each in enumerate(written, start=1)]


def _change(each: dict[str, Any], place: str, folder: pathlib.Path) -> Change:
    if missing := [key for key in ("id", "file", "old", "new", "what") if not isinstance(each.get(key), str)]:
        raise ValueError(f"{place}: {', '.join(missing)} must be there, as text")
    file = pathlib.PurePath(each["file"])
    source = folder.parent / file
    if not file.is_relative_to(folder.name) or not source.is_file():
        raise ValueError(f"{place}: there is no {file} below {folder}")
    data, old, new = source.read_bytes(), each["old"], each["new"]
    if (count := data.count(old.encode())) != 1:
        raise ValueError(f"{place}: `old` occurs {count} times in {file}, not once")
    # What surrounds the change would have items run that do not meet it.
    before = _shared(old, new)
    after = _shared(old[before:][::-1], new[before:][::-1])
    start = data.index(old.encode()) + len(old[:before].encode())
    end = start + len(old[before : len(old) - after].encode())
    first, last = statement_at(data, start) or (_line(data, start), _line(data, max(start, end - 1)))
    return Change(
        name=each["id"],
        file=file.relative_to(folder.name).as_posix(),
        start=start,
        end=end,
        new=new[before : len(new) - after],
        kind=each["what"],
        first=first,
        last=last,
        function=file.stem,
    )


def _shared(one: str, other: str) -> int:
    """With how many characters both begin."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _line(data: bytes, place: int) -> int:
    return data.count(b"\n", 0, place) + 1
