"""Plants a mutant in a process: the function that there is gets the code of the edited source.

The function itself stays, so that the edit is visible wherever it was imported by name, is wrapped by a decorator, or
is registered as a hook. So do those that it has made already, if it is a decorator itself. Nothing is taken back: the
processes of a mutant end with it.

A rank plants the mutant of the file :data:`FILE` of its folder before the first case that it runs. The controller
compiles it (:func:`compiled`), because ranks have better things to do.
"""

import __future__

import ast
import contextlib
import functools
import importlib
import inspect
import marshal
import pathlib
import types
from collections.abc import Iterator
from typing import Any

from shardproof.harness.worlds.jobs import Job

FILE = "mutant"
#: The file that a rank leaves in the folder if the case came to the changed statement.
REACHED = "reached"
#: The global variable of the changed module whose only element says that; plain data, which ``torch.compile`` traces.
_MARK = "__mutant__"

_reached: list[bool] = [False]
_is_planted = False


@contextlib.contextmanager
def planted(folder: pathlib.Path, rank: int, job: Job) -> Iterator[None]:
    """Plant the mutant of the folder, if it has one: an instrument (``harness/worlds/instruments.py``)."""
    global _is_planted
    path = folder / FILE
    if not _is_planted and path.exists():
        plant(path.read_bytes())
        _is_planted = True
    _reached[0] = False
    try:
        yield
    finally:
        if _reached[0]:
            (folder / REACHED).touch()


def plant(packed: bytes) -> None:
    """Plant what :func:`compiled` has packed."""
    module, name, first, code, default = marshal.loads(packed)
    function = function_of(module, name, first)
    assert function is not None, f"{module} has no {name}"
    function.__globals__[_MARK] = _reached
    inside = _pairs(function.__code__, code)
    function.__code__ = code
    # What a decorator made of the functions of its module when this was imported. The collector may not know them: the
    # objects with which ranks begin are frozen.
    spaces = [function.__globals__, *(vars(one) for one in function.__globals__.values() if isinstance(one, type))]
    for one in [value for space in spaces for value in space.values()] if inside else ():
        if type(one) is types.FunctionType and (new := inside.get(one.__code__)) is not None:
            one.__code__ = new
    if default is None:
        return
    position, keyword, text = default
    value = eval(text, function.__globals__)
    if keyword:
        assert function.__kwdefaults__ is not None
        function.__kwdefaults__[keyword] = value
    else:
        assert function.__defaults__ is not None
        function.__defaults__ = (*function.__defaults__[:position], value, *function.__defaults__[position + 1 :])


def _pairs(old: types.CodeType, new: types.CodeType) -> dict[types.CodeType, types.CodeType]:
    """The codes of functions inside a function that differ, each with the new one, if it has the same variables."""
    found: dict[types.CodeType, types.CodeType] = {}
    inner = ([one for one in code.co_consts if isinstance(one, types.CodeType)] for code in (old, new))
    for one, other in zip(*inner, strict=False):
        if one.co_qualname == other.co_qualname and one != other:
            found |= _pairs(one, other)
            if one.co_freevars == other.co_freevars:
                found[one] = other
    return found


def function_of(module: str, name: str, first: int) -> types.FunctionType | None:
    """The function of a qualified name whose code begins with a line; None if the module has none."""
    owner: Any = importlib.import_module(module)
    *classes, last = name.split(".")
    for part in classes:
        owner = getattr(owner, part, None)
    found = [inspect.getattr_static(owner, last, None)]
    for value in found:  # which grows by what is inside
        if isinstance(value, types.FunctionType):
            code = value.__code__
            if (code.co_qualname, code.co_firstlineno) == (name, first):
                return value
        inner = [getattr(value, key, None) for key in ("__wrapped__", "__func__", "fget", "fset", "fdel", "func")]
        inner += [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if cell != types.CellType()]
        found += [one for one in inner if callable(one) or isinstance(one, property | staticmethod | classmethod)]
        if len(found) > 50:
            break
    return None


def compiled(source: Any, definition: tuple[Any, tuple[Any, ...]], mutant: Any, path: pathlib.Path) -> bytes:
    """Pack a mutant for ranks.

    Args:
        source: the ``rules.Source`` of the module.
        definition: the function and what is around it, as ``rules.definitions`` has them.
        mutant: the ``rules.Mutant``.
        path: the file of the module.

    Raises:
        ValueError: it cannot be planted: the edited text is no Python, or the installed module has no such function.
    """
    function, around = definition
    chain = [*around, function]
    # Functions inside a function are made anew with each call of it.
    outermost = next(index for index, one in enumerate(chain) if not isinstance(one, ast.ClassDef))
    classes, outer = chain[:outermost], chain[outermost]
    name = ".".join(one.name for one in chain[: outermost + 1])
    first = min([outer.lineno, *(one.lineno for one in outer.decorator_list)])
    begin, end = source.line(first), source.end(outer)
    old = mutant.old.encode()
    text = source.text[begin : mutant.start] + mutant.new.encode() + source.text[mutant.start + len(old) : end]
    head = [f"{' ' * one.col_offset}class {one.name}:" for one in classes]
    if chain[0].col_offset:
        head.insert(0, "if True:")
    try:
        tree = ast.parse("\n".join([*head, text.decode()]))
        ast.increment_lineno(tree, first - 1 - len(head))
        edited = next(one for one in ast.walk(tree) if isinstance(one, type(outer)) and one.name == outer.name)
        _mark(edited, mutant.line)
        code: Any = compile(tree, str(path), "exec", flags=_flags(source), dont_inherit=True)
    except SyntaxError as error:
        raise ValueError(f"it is no Python: {error}") from None
    for part in name.split("."):
        code = next(one for one in code.co_consts if isinstance(one, types.CodeType) and one.co_name == part)
    found = function_of(mutant.module, name, first)
    if found is None:
        raise ValueError(f"the installed {mutant.module} has no {name} in line {first}")
    if found.__code__.co_freevars != code.co_freevars:
        raise ValueError("the edit takes a variable of the surrounding scope out")
    is_outer = mutant.rule == "default" and outer is function
    return marshal.dumps((mutant.module, name, first, code, _default(outer, edited) if is_outer else None))


@functools.cache
def _flags(source: Any) -> int:
    is_future = any(isinstance(one, ast.ImportFrom) and one.module == "__future__" for one in source.tree.body)
    return __future__.annotations.compiler_flag if is_future else 0


def _default(old: Any, new: Any) -> tuple[int, str, str]:
    """The one default of two versions of a function that differs: its position, or its name, and its text."""
    for key in ("defaults", "kw_defaults"):
        for index, (one, other) in enumerate(zip(getattr(old.args, key), getattr(new.args, key), strict=True)):
            if one is not None and ast.dump(one) != ast.dump(other):
                return index, old.args.kwonlyargs[index].arg if key == "kw_defaults" else "", ast.unparse(other)
    raise ValueError("no default differs")


def _mark(node: ast.AST, line: int) -> bool:
    """Put the mark before the innermost statement of a function that has a line, or first into the function."""
    for block in (getattr(node, field, []) for field in ("body", "orelse", "finalbody")):
        for index, statement in enumerate(block):
            if statement.lineno <= line <= statement.end_lineno:
                if not _mark(statement, line):
                    _insert(block, index, statement)
                return True
    for inner in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
        if _mark(inner, line):
            return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        _insert(node.body, 0, node.body[0])
        return True
    return False


def _insert(block: list[ast.stmt], index: int, beside: ast.stmt) -> None:
    (mark,) = ast.parse(f"{_MARK}[0] = True").body
    for one in ast.walk(mark):
        ast.copy_location(one, beside)
    block.insert(index, mark)
