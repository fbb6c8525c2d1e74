"""Tables of names: ids of labels and words, as data sets and scripts have them, which may differ between processes.

The order of a set of str is another one in each process.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import sys
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import ConcatDataset, Subset

#: The fewest and the most names of a table; the fewest of one that is a global of the script.
_FEWEST, _MOST, _FEWEST_OF_SCRIPT = 2, 8192, 3

#: How many objects are looked into, and how deep.
_MOST_OBJECTS, _DEPTH = 64, 2

#: How many rows data have for each entry of a list of classes, at least; a list of as many entries is of rows.
_ROWS_OF_EACH = 4

#: Endings of names of files, and what is in paths.
_OF_PATHS = ("/", "\\")


@dataclasses.dataclass(frozen=True)
class NameTable:
    """Numbers of names.

    Attributes:
        size: how many.
        members: stands for the names.
        order: stands for the names in the order of the numbers.
        first: some of them, in this order.
    """

    size: int
    members: int
    order: int
    first: tuple[str, ...]


def tables_of(data: Any, collate: Any = None) -> dict[str, NameTable]:
    """Return the tables of names that a data set has, or what it is made of, by the names of its attributes."""
    size, found = _size_of(data), dict[str, NameTable]()
    objects = [*_parts_of(data)] + ([("collate_fn", collate)] if collate is not None else [])
    for name, value in itertools.islice(_attributes(objects), _MOST_OBJECTS * _MOST_OBJECTS):
        table = _table(value) or (_list(value) if _ROWS_OF_EACH * _length(value) <= size else None)
        if table is not None:
            found.setdefault(name, table)
    return found


def tables_of_script() -> dict[str, NameTable]:
    """Return those that are global variables of the script."""
    values = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    found = {f"global {name}": _table(one) for name, one in list(values.items()) if not name.startswith("_")}
    return {name: one for name, one in found.items() if one is not None and one.size >= _FEWEST_OF_SCRIPT}


def _parts_of(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield the data set, and those that it is a part of, or made of."""
    if isinstance(data, ConcatDataset):
        for one in data.datasets[:_MOST_OBJECTS]:
            yield from _parts_of(one)
    elif isinstance(data, Subset):
        yield from _parts_of(data.dataset)
    else:
        yield type(data).__name__, data


def _attributes(objects: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield what objects have, and what this has, with its name."""
    seen: set[int] = set()
    level = list(objects)
    for _ in range(_DEPTH):
        below = []
        for name, one in level[:_MOST_OBJECTS]:
            if id(one) in seen:
                continue
            seen.add(id(one))
            for inner, value in _inside(one):
                yield f"{name}.{inner}", value
                below.append((f"{name}.{inner}", value))
        level = [(name, one) for name, one in below if isinstance(one, types.FunctionType) or _is_of_user(one)]


def _inside(one: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object of user code, or the variables around a function."""
    if isinstance(one, types.MethodType):
        one = one.__self__
    if isinstance(one, types.FunctionType):
        cells = zip(one.__code__.co_freevars, one.__closure__ or (), strict=False)
        return [(name, cell.cell_contents) for name, cell in cells if _is_full(cell)]
    values = getattr(one, "__dict__", None)
    return list(values.items()) if isinstance(values, dict) else []


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_of_user(one: Any) -> bool:
    is_plain = isinstance(one, (type, types.ModuleType, types.BuiltinFunctionType))
    return not is_plain and type(one).__module__.partition(".")[0] not in ("torch", "numpy", "builtins")


def _table(value: Any) -> NameTable | None:
    """Return a table of numbers from some number up, each of a name, or of names of such numbers."""
    if type(value) not in (dict, collections.OrderedDict) or not _FEWEST <= len(value) <= _MOST:
        return None
    ids = value if all(type(one) is str for one in value) else _inverted(value)
    if ids is None or not all(type(one) is int for one in ids.values()) or any(map(_is_path, ids)):
        return None
    least = min(ids.values())
    if sorted(ids.values()) != list(range(least, least + len(ids))):
        return None
    return _of_names(sorted(ids, key=ids.__getitem__))


def _inverted(value: Mapping[Any, Any]) -> dict[str, int] | None:
    if not all(type(one) is str for one in value.values()):
        return None
    ids = {name: number for number, name in value.items()}
    return ids if len(ids) == len(value) else None


def _list(value: Any) -> NameTable | None:
    """Return the table of a list of different names, whose numbers are their places."""
    if type(value) not in (list, tuple) or not _FEWEST <= len(value) <= _MOST:
        return None
    if not all(type(one) is str for one in value) or len(set(value)) < len(value) or any(map(_is_path, value)):
        return None
    return _of_names(list(value))


def _of_names(names: list[str]) -> NameTable:
    members, order = (zlib.crc32("\0".join(one).encode(errors="replace")) for one in (sorted(names), names))
    return NameTable(len(names), members, order, tuple(names[:3]))


def _is_path(name: str) -> bool:
    ending = name.rpartition(".")[2] if "." in name else ""
    return any(one in name and name != one for one in _OF_PATHS) or (1 < len(ending) < 5 and ending.isalnum())


def _size_of(data: Any) -> int:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return 0


def _length(value: Any) -> int:
    return len(value) if type(value) in (list, tuple) else 0
