"""Changes as rows of ``planted/<chapter>.toml``: hand-written ones, and the findings of a sweep."""

from __future__ import annotations

import ast
import itertools
import json
import pathlib
import re
import textwrap
import tomllib
from collections.abc import Mapping
from typing import Any

from planted.table import contract_marks
from sweeping.changes import Change, statement_at


def read_changes(path: pathlib.Path, folder: pathlib.Path) -> list[Change]:
    """The changes of a table of planted bugs (``planted/table.py``); a ValueError names a row that does not fit.

    Of its rows ``id``, ``in``, ``old`` and ``new`` are read; those without ``old``, which are no edits, are left out.
    With the name of ``folder``, that of the sources, ``in`` begins.
    """
    try:
        rows = tomllib.loads(path.read_text())["bug"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is no table of planted bugs: {error!r}") from None
    return [_change(row, f"{path}, row {number}", folder) for number, row in enumerate(rows, start=1) if "old" in row]


def _change(row: dict[str, Any], place: str, folder: pathlib.Path) -> Change:
    if missing := [key for key in ("id", "in", "old", "new") if not isinstance(row.get(key), str)]:
        raise ValueError(f"{place}: {', '.join(missing)} must be there, as text")
    module, _, name = row["in"].partition(":")
    source = folder.parent / (module.replace(".", "/") + ".py")
    if module.partition(".")[0] != folder.name or not source.is_file():
        raise ValueError(f"{place}: there is no module {module} below {folder}")
    data = source.read_bytes()
    if (span := _function(data, name)) is None:
        raise ValueError(f"{place}: {module} has no function {name}")
    whole = data[slice(*span)].decode()
    indent = whole[: len(whole) - len(whole.lstrip())]
    text = textwrap.dedent(whole)
    if (count := text.count(row["old"])) != 1:
        raise ValueError(f"{place}: `old` occurs {count} times in {row['in']}, not once")
    new = textwrap.indent(text.replace(row["old"], row["new"]), indent)
    # What surrounds the change would have items run that do not meet it.
    before = _shared(whole, new)
    after = _shared(whole[before:][::-1], new[before:][::-1])
    start = span[0] + len(whole[:before].encode())
    end = start + len(whole[before : len(whole) - after].encode())
    first, last = statement_at(data, start) or (_line(data, start), _line(data, max(start, end - 1)))
    return Change(
        name=row["id"],
        file=source.relative_to(folder).as_posix(),
        start=start,
        end=end,
        new=new[before : len(new) - after],
        kind="planted",
        first=first,
        last=last,
        function=name,
    )


def rows_of(changes: Mapping[str, Change], found: Mapping[str, tuple[str, str]], folder: pathlib.Path) -> str:
    """A table of changes that items found, to choose from; the id of a row wants a better name.

    ``found`` has, by the name of a change, the id of the item that failed, and what it said.
    """
    marks, rows = contract_marks(), []
    for name, (item, says) in found.items():
        change = changes[name]
        data = (folder / change.file).read_bytes()
        span = _function(data, change.function)
        if span is None:
            continue
        old, new = _texts(data, change, span)
        line = next((line.strip() for line in says.splitlines() if len(line.strip()) >= 12), says)
        row = {
            "id": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"),
            "requirement": next(iter(marks.get(item.partition("[")[0], ())), ""),
            "in": f"{folder.name}.{change.file.removesuffix('.py').replace('/', '.')}:{change.function}",
            "old": old,
            "new": new,
            "found_by": item.partition("::")[2],
            "says": line[:100],
        }
        # A basic string of TOML has the escapes of JSON.
        rows.append("[[bug]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in row.items()))
    return "\n".join(rows)


def _texts(data: bytes, change: Change, span: tuple[int, int]) -> tuple[str, str]:
    """The lines of a change before and after it, with as many before them as make them unique in their function."""
    whole = data[slice(*span)].decode()
    indent = whole[: len(whole) - len(whole.lstrip())]
    first = data.rfind(b"\n", 0, change.start) + 1
    last = data.find(b"\n", change.end) + 1 or len(data)
    while True:
        texts = [data[first:last], data[first : change.start] + change.new.encode() + data[change.end : last]]
        old, new = (re.sub(f"^{indent}", "", text.decode(), flags=re.MULTILINE) for text in texts)
        if textwrap.dedent(whole).count(old) == 1 or first <= span[0]:
            return old, new
        first = data.rfind(b"\n", 0, first - 1) + 1


def _function(data: bytes, name: str) -> tuple[int, int] | None:
    """Where the lines of a function begin and end, by its qualified name."""
    body: list[ast.stmt] = ast.parse(data).body
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next((one for one in body if getattr(one, "name", None) == part), None)
        if not isinstance(found, (ast.FunctionDef, ast.ClassDef)):
            return None
        body = found.body
    assert isinstance(found, (ast.FunctionDef, ast.ClassDef)) and found.end_lineno is not None
    first = min(one.lineno for one in [found, *found.decorator_list])
    lines = data.splitlines(keepends=True)
    return sum(map(len, lines[: first - 1])), sum(map(len, lines[: found.end_lineno]))


def _shared(one: str, other: str) -> int:
    """With how many characters both begin."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _line(data: bytes, place: int) -> int:
    return data.count(b"\n", 0, place) + 1
