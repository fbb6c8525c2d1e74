"""Changes of one place in the functions of a source file, as a programmer might make them by mistake.

They are made from the syntax tree: a call or an assignment that is missing, a condition that is always or never true, a
loop that leaves out an element, a keyword that is not passed, and so on. Messages of errors and annotations stay.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

_COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_COMPUTED = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.BitOr: "&",
    ast.BitAnd: "|",
}  # fmt: skip
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_CONVERSIONS = {"list", "tuple", "set", "frozenset", "sorted", "reversed", "dict", "int", "float", "bool", "abs"}
_COPIES = {"detach", "clone", "contiguous", "flatten", "copy", "float", "cpu"}
_REDUCTIONS = {"AVG": "SUM", "SUM": "AVG", "MAX": "SUM"}


@dataclasses.dataclass(frozen=True)
class Change:
    """A text that takes the place of another one, from byte ``start`` to before byte ``end`` of a file of the sources.

    The name is "FILE:LINE:NUMBER"; the number counts the changes that begin on a line. ``first`` and ``last`` are the
    lines of the statement, or of its head if it has a body.
    """

    name: str
    file: str
    start: int
    end: int
    new: str
    kind: str
    first: int
    last: int
    function: str

    def applied(self, source: bytes) -> bytes:
        """The source with the change."""
        return source[: self.start] + self.new.encode() + source[self.end :]


class _Piece(NamedTuple):
    start: int
    end: int
    new: str
    kind: str


def changes_of(folder: pathlib.Path) -> list[Change]:
    """All changes of the Python files below a folder, in the order of the files and their lines."""
    return [change for path in sorted(folder.rglob("*.py")) for change in _of_file(path, folder)]


def statement_at(source: bytes, start: int) -> tuple[int, int] | None:
    """The first and the last line of the innermost statement of a function that has a byte; of its head with a body."""
    text = _Text(source)
    around = [
        statement
        for function, _ in _functions(text.tree.body, "")
        for statement in _statements(function.body)
        if text.span(statement)[0] <= start < text.span(statement)[1]
    ]
    return _head(around[-1]) if around else None


def _of_file(path: pathlib.Path, folder: pathlib.Path) -> Iterator[Change]:
    text = _Text(path.read_bytes())
    numbers: collections.Counter[int] = collections.Counter()
    file = path.relative_to(folder).as_posix()
    for function, name in _functions(text.tree.body, ""):
        for statement in _statements(function.body):
            answers = isinstance(function.returns, ast.Name) and function.returns.id == "bool"
            for piece in _pieces(text, statement, answers):
                if not text.differs(piece):
                    continue
                line = text.data.count(b"\n", 0, piece.start) + 1
                numbers[line] += 1
                yield Change(f"{file}:{line}:{numbers[line]}", file, *piece, *_head(statement), name)


class _Text:
    """A source file and its syntax tree."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.tree = ast.parse(data)
        self._lines = [0]
        for line in data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """The first byte of the node, and the one after its last."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        """The text of the node."""
        start, end = self.span(node)
        return self.data[start:end].decode()

    def differs(self, piece: _Piece) -> bool:
        """Whether the piece changes the source and leaves one that can be parsed."""
        if self.data[piece.start : piece.end] == piece.new.encode():
            return False
        try:
            ast.parse(self.data[: piece.start] + piece.new.encode() + self.data[piece.end :])
        except SyntaxError:
            return False
        return True


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield node, f"{prefix}{node.name}"
        elif isinstance(node, ast.If):
            yield from _functions(node.body, prefix)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements, those of functions within functions as well."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            continue
        yield statement
        for part in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, part, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _head(statement: ast.stmt) -> tuple[int, int]:
    body = getattr(statement, "body", None)
    assert statement.end_lineno is not None
    return statement.lineno, max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno


def _pieces(text: _Text, statement: ast.stmt, answers: bool) -> Iterator[_Piece]:
    """The changes of a statement, without those of the statements in it."""
    match statement:
        case ast.Expr(value=ast.Constant()):
            pass
        case ast.Expr(value=ast.Yield(value=value)):
            yield from _within(text, value)
        case ast.Expr(value=value):
            yield _Piece(*text.span(statement), "pass", "missing call")
            yield from _within(text, value)
        case ast.Assign(targets=[target, *_], value=value) | ast.AnnAssign(target=target, value=value):
            if isinstance(target, (ast.Attribute, ast.Subscript)) and value is not None:
                yield _Piece(*text.span(statement), "pass", "missing assignment")
            yield from _within(text, value)
        case ast.AugAssign(target=target, value=value):
            yield _Piece(*text.span(statement), "pass", "missing assignment")
            yield _Piece(*text.span(statement), f"{text.of(target)} = {text.of(value)}", "replaced, not added")
            yield from _within(text, value)
        case ast.Raise() | ast.Delete() | ast.Continue() | ast.Break() | ast.Return(value=None):
            yield _Piece(*text.span(statement), "pass", f"missing {type(statement).__name__.lower()}")
        case ast.Return(value=ast.expr() as value) if answers:
            yield _Piece(*text.span(value), f"not ({text.of(value)})", "opposite")
            yield from _tested(text, value)
        case ast.Return(value=value):
            yield _Piece(*text.span(statement), "return None", "returns nothing")
            yield from _within(text, value)
        case ast.If(test=test):
            yield _Piece(*text.span(test), "False", "never")
            yield _Piece(*text.span(test), "True", "always")
            yield from _tested(text, test)
        case ast.While(test=test):
            yield _Piece(*text.span(test), f"not ({text.of(test)})", "opposite")
            yield from _tested(text, test)
        case ast.For(iter=iterated):
            for part, kind in (("[1:]", "without the first"), ("[:-1]", "without the last"), ("[::-1]", "backwards")):
                yield _Piece(*text.span(iterated), f"list({text.of(iterated)}){part}", kind)
            yield from _within(text, iterated)
        case ast.With(items=items):
            yield from _managed(text, statement, items)


def _managed(text: _Text, statement: ast.stmt, items: list[ast.withitem]) -> Iterator[_Piece]:
    start, _ = text.span(statement)
    _, end = text.span(items[-1].optional_vars or items[-1].context_expr)
    for item in items:
        if item.optional_vars is None:
            others = ", ".join(_item(text, other) for other in items if other is not item)
            yield _Piece(start, end, f"with {others}" if others else "if True", "missing context")
        yield from _within(text, item.context_expr)


def _item(text: _Text, item: ast.withitem) -> str:
    name = f" as {text.of(item.optional_vars)}" if item.optional_vars is not None else ""
    return text.of(item.context_expr) + name


def _tested(text: _Text, test: ast.expr) -> Iterator[_Piece]:
    """The changes of a condition; its opposite is made elsewhere, as those of a single comparison would be."""
    if isinstance(test, ast.Compare) and not isinstance(test.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE)):
        for part in (test.left, *test.comparators):
            yield from _within(text, part)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _within(text, test.operand)
    else:
        yield from _within(text, test)


def _within(text: _Text, node: ast.AST | None) -> Iterator[_Piece]:
    """The changes of an expression and of those in it."""
    if node is None or isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.expr):
        yield from _of_expression(text, node)
    for child in ast.iter_child_nodes(node):
        yield from _within(text, child)


def _of_expression(text: _Text, node: ast.expr) -> Iterator[_Piece]:
    span = text.span(node)
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield _Piece(*span, f"{text.of(left)} {_COMPARED[type(operator)]} {text.of(right)}", "other comparison")
        case ast.BoolOp(op=operator, values=values):
            yield from _combined(text, span, isinstance(operator, ast.And), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield _Piece(*span, f"({text.of(operand)})", "opposite")
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _COMPUTED and not _is_text(left):
            yield _Piece(*span, f"{text.of(left)} {_COMPUTED[type(operator)]} {text.of(right)}", "other arithmetic")
        case ast.Constant(value=bool(value)):
            yield _Piece(*span, str(not value), "opposite")
        case ast.Constant(value=int(value)):
            yield _Piece(*span, str(value + 1), "off by one")
        case ast.IfExp(body=body, orelse=orelse):
            yield _Piece(*span, f"({text.of(body)})", "always")
            yield _Piece(*span, f"({text.of(orelse)})", "never")
        case ast.Attribute(value=ast.Name(id="ReduceOp"), attr=name) if name in _REDUCTIONS:
            yield _Piece(*span, f"ReduceOp.{_REDUCTIONS[name]}", "other reduction")
        case ast.Slice(lower=lower, upper=upper):
            for bound in filter(None, (lower, upper)):
                yield _Piece(*text.span(bound), "", "missing bound")
        case (
            ast.ListComp(generators=generators)
            | ast.SetComp(generators=generators)
            | ast.DictComp(generators=generators)
            | ast.GeneratorExp(generators=generators)
        ):
            for condition in (condition for generator in generators for condition in generator.ifs):
                yield _Piece(*text.span(condition), "True", "always")
        case ast.Call():
            yield from _called(text, span, node)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _combined(text: _Text, span: tuple[int, int], is_and: bool, values: list[ast.expr]) -> Iterator[_Piece]:
    own, other = (" and ", " or ") if is_and else (" or ", " and ")
    if len(values) == 2:
        yield _Piece(*span, f"({other.join(map(text.of, values))})", "other connective")
    for value in values:
        yield _Piece(*span, f"({own.join(text.of(kept) for kept in values if kept is not value)})", "missing operand")


def _called(text: _Text, span: tuple[int, int], call: ast.Call) -> Iterator[_Piece]:
    match call:
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _CONVERSIONS:
            yield _Piece(*span, f"({text.of(argument)})", "not converted")
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]) if name in _COPIES:
            yield _Piece(*span, text.of(value), "not converted")
        case ast.Call(func=ast.Name(id=name) as function) if name in _OPPOSITES:
            yield _Piece(*text.span(function), _OPPOSITES[name], "opposite")
    arguments = [text.of(argument) for argument in call.args]
    _, start = text.span(call.func)
    for keyword in call.keywords:
        if keyword.arg is not None:
            others = [text.of(other) for other in call.keywords if other is not keyword]
            yield _Piece(start, span[1], f"({', '.join(arguments + others)})", f"without {keyword.arg}")
