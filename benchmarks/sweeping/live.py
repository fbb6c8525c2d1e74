"""Gives live functions changed code, and takes it back: a process need not start anew for each change."""

from __future__ import annotations

import functools
import importlib
import pathlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from sweeping.changes import Change


def apply(change: Change, folder: pathlib.Path) -> list[tuple[types.FunctionType, types.CodeType]]:
    """Change live functions, enclosed ones too, and return each with its old code, for :func:`take_back`."""
    path = folder / change.file
    # A fresh rank may not have imported it yet, and would then run it unchanged.
    importlib.import_module(_module_name(path))
    source = path.read_bytes()
    old, new = (dict(_codes(compile(text, str(path), "exec"))) for text in (source, change.applied(source)))
    changed = {_place(code): new[key] for key, code in old.items() if key in new and new[key] != code}
    undo = []
    for function in _functions(folder, str(path)):
        code = changed.get(_place(function.__code__))
        # Closures keep their cells: code with others does not fit them.
        if code is not None and code.co_freevars == function.__code__.co_freevars:
            undo.append((function, function.__code__))
            function.__code__ = code
    return undo


def take_back(undo: list[tuple[types.FunctionType, types.CodeType]]) -> None:
    """Give the functions their code back, and empty the list."""
    while undo:
        function, code = undo.pop()
        function.__code__ = code


def _module_name(path: pathlib.Path) -> str:
    names = [] if path.stem == "__init__" else [path.stem]
    while (path.parent / "__init__.py").exists():
        path = path.parent
        names.append(path.name)
    return ".".join(reversed(names))


def _codes(code: types.CodeType, key: tuple[tuple[str, int], ...] = ()) -> Iterator[tuple[Any, types.CodeType]]:
    """The functions of a module's code, the module itself left out, by their path within it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    for number, each in enumerate(inner):
        path = (*key, (each.co_qualname, number))
        yield path, each
        yield from _codes(each, path)


def _place(code: types.CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _functions(folder: pathlib.Path, path: str) -> list[types.FunctionType]:
    """The live functions of a file that modules of the folder reach, through classes, wrappers and closures too."""
    seen: set[int] = set()
    found = []
    pending: list[Any] = [
        value
        for module in list(sys.modules.values())
        if folder in pathlib.Path(getattr(module, "__file__", None) or "/").parents
        for value in list(vars(module).values())
    ]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType) and value.__code__.co_filename == path:
            found.append(value)
        pending += _reached(value)
    return found


def _reached(value: Any) -> Iterable[Any]:
    """What a function, a class or a wrapper holds; nothing of other objects, whose number has no bound."""
    match value:
        case types.FunctionType():
            return (*_cells(value), getattr(value, "__wrapped__", None))
        case type():
            return tuple(vars(value).values())
        case staticmethod() | classmethod() | types.MethodType():
            return (value.__func__,)
        case property():
            return (value.fget, value.fset, value.fdel)
        case functools.cached_property() | functools.partial():
            return (value.func,)
        case functools._lru_cache_wrapper():
            return (value.__wrapped__,)
        case dict():
            return tuple(item for item in value.values() if callable(item))
    return ()


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        # An empty cell belongs to a name that is not assigned yet.
        try:
            yield cell.cell_contents
        except ValueError:
            continue
