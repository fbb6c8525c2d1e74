"""The rules by which source is changed, and the draw of mutants among the functions of some modules.

A rule is a function of a node of the syntax tree that yields edits of the source. Left alone are the places where a
mistake is no wrong training: log lines, warnings, texts of errors, assertions and functions of nothing else,
annotations, decorators, blocks for type checkers, ``__repr__``; and the branches for which
``planted/reasons/branches.toml`` says why no item takes them.
"""

import ast
import collections
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import pathlib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from planted import coverage

Function = ast.FunctionDef | ast.AsyncFunctionDef
Edit = tuple[int, int, str]
"""The bytes of the source that an edit replaces, from and to, and the new text."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One edit of one function.

    Attributes:
        place: the function, as "module:qualified name", which is that of the map.
        rule: one of :data:`RULES`.
        line: the line of the file in which the old text begins.
        start: the byte of the file with which it begins.
        old: the text that is replaced.
        new: the text in its place.
        nth: how many mutants of the function with the same rule and texts come before it.
    """

    place: str
    rule: str
    line: int
    start: int
    old: str
    new: str
    nth: int = 0

    @property
    def module(self) -> str:
        """The module of the function."""
        return self.place.partition(":")[0]

    @property
    def id(self) -> str:
        """A name that depends on the place and the texts, and on no line."""
        text = "\0".join([self.place, self.rule, self.old, self.new, str(self.nth)])
        return hashlib.sha256(text.encode()).hexdigest()[:10]


class Source:
    """The source of a module: its bytes, its syntax tree, and where nodes are."""

    def __init__(self, text: bytes) -> None:
        self.text, self.tree = text, ast.parse(text)
        self._lines = [0, *itertools.accumulate(len(line) for line in text.splitlines(keepends=True))]

    def line(self, number: int) -> int:
        """The byte with which a line begins, counted from 1."""
        return self._lines[number - 1]

    def start(self, node: Any) -> int:
        """The byte with which a node begins."""
        return self.line(node.lineno) + int(node.col_offset)

    def end(self, node: Any) -> int:
        """The byte after a node."""
        return self.line(node.end_lineno) + int(node.end_col_offset)

    def of(self, node: ast.AST) -> str:
        """The text of a node."""
        return self.text[self.start(node) : self.end(node)].decode()

    def first_line(self, node: ast.AST) -> str:
        """The line in which a node begins, without the white space around it."""
        begin = self.line(node.lineno)  # type: ignore[attr-defined]
        return self.text[begin:].partition(b"\n")[0].decode().strip()

    def whole(self, node: ast.AST, new: str) -> Edit:
        """The edit that replaces a node."""
        return self.start(node), self.end(node), new


@functools.cache
def source_of(path: pathlib.Path) -> Source:
    """The source of a file."""
    return Source(path.read_bytes())


# What is left alone.

_SAID = re.compile(
    r"(^|\.)_?(log|logger|logging|warnings|print|print_stack|p_assert|warning_once|log_api_usage_once)(\.|$)"
)
_WITHOUT = {"__repr__", "__str__", "extra_repr", "_get_name"}


def _is_said(node: ast.AST, checks: frozenset[str] = frozenset()) -> bool:
    """Whether a statement tells somebody something, or checks what the code itself keeps, as these functions do."""
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.Raise):
        return node.exc is not None and "AssertionError" in ast.unparse(node.exc)
    if isinstance(node, ast.If):
        is_for_types = "TYPE_CHECKING" in ast.unparse(node.test)
        return is_for_types or (not node.orelse and all(_is_said(one, checks) for one in node.body))
    if not isinstance(node, ast.Expr):
        return False
    value = node.value
    if not isinstance(value, ast.Call):
        return isinstance(value, ast.Constant)
    called = ast.unparse(value.func)
    return bool(_SAID.search(called)) or called.rpartition(".")[2] in checks


@functools.cache
def _checks(source: Source) -> frozenset[str]:
    """The private functions of a module whose statements are all said: assertions, in torch's words, with a name."""
    found = [node for node, _ in definitions(source).values() if node.name.startswith("_")]
    checks = frozenset[str]()
    while more := {one.name for one in found if all(_is_said(part, checks) for part in one.body)} - checks:
        checks |= more
    return checks


def _nodes(node: ast.AST, checks: frozenset[str] = frozenset()) -> Iterator[ast.AST]:
    """The nodes of a function in the order of the source, without what is left alone and without inner functions."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, Function | ast.ClassDef | ast.JoinedStr):
                continue
            if _is_said(child, checks):
                continue
            yield child
            if not isinstance(child, ast.Raise):
                yield from _nodes(child, checks)


# The rules.


def _negated(source: Source, test: ast.expr) -> Edit:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return source.whole(test, f"({source.of(test.operand)})")
    return source.whole(test, f"(not ({source.of(test)}))")


def _condition(source: Source, node: ast.AST) -> Iterator[Edit]:
    """A condition is negated, or one operand of it."""
    tests: list[ast.expr] = []
    if isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Constant):
        tests.append(node.test)
    elif isinstance(node, ast.comprehension):
        tests += node.ifs
    elif isinstance(node, ast.Return | ast.Assign) and isinstance(node.value, ast.Compare | ast.BoolOp):
        tests.append(node.value)
    for test in tests:
        yield _negated(source, test)
        if isinstance(test, ast.BoolOp):
            yield from (_negated(source, operand) for operand in test.values)


_MOVED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_OTHER_END = {"min": "max", "max": "min"}


def _is_number(node: ast.AST | None) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) is int


def _bound(source: Source, node: ast.AST) -> Iterator[Edit]:
    """A bound moves by one, or loses its end."""
    numbers: list[ast.AST | None] = []
    if isinstance(node, ast.Compare):
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            if new := _MOVED.get(type(operator)):
                # Parentheses around an operand are between them too.
                between = source.text[source.end(left) : source.start(right)].decode()
                yield source.end(left), source.start(right), re.sub(r"[<>]=?", new, between, count=1)
            numbers.append(right)
    elif isinstance(node, ast.Subscript):
        numbers += [node.slice.lower, node.slice.upper] if isinstance(node.slice, ast.Slice) else [node.slice]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and _is_number(node.right):
        yield source.whole(node, source.of(node.left))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _OTHER_END:
        yield source.whole(node.func, _OTHER_END[node.func.id])
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        yield source.whole(node.args[-1], f"({source.of(node.args[-1])}) - 1")
    for number in numbers:
        if _is_number(number):
            assert number is not None
            yield source.whole(number, str(ast.literal_eval(source.of(number)) + 1))


def _statement(source: Source, node: ast.AST) -> Iterator[Edit]:
    """A statement is taken out that calls, raises, deletes, leaves, or sets what others read."""
    is_call = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Yield | ast.YieldFrom)
    sets = isinstance(node, ast.Assign) and all(isinstance(one, ast.Attribute | ast.Subscript) for one in node.targets)
    leaves = isinstance(node, ast.Continue | ast.Break) or (isinstance(node, ast.Return) and node.value is None)
    if is_call or sets or leaves or isinstance(node, ast.AugAssign | ast.Delete | ast.Raise):
        yield source.whole(node, "pass")


def _without(source: Source, call: ast.Call, keyword: ast.keyword) -> Edit:
    """The edit that takes a keyword argument out of a call."""
    begin, end = source.start(keyword), source.end(keyword)
    after = re.match(rb"\s*,\s*", source.text[end:])
    if after:
        return begin, end + after.end(), ""
    before = re.search(rb",?\s*$", source.text[source.end(call.func) : begin])
    return begin - (before.end() - before.start() if before else 0), end, ""


_DTYPE = re.compile(r"dtype\b|torch\.(b?float|half|double)")


def _argument(source: Source, node: ast.AST) -> Iterator[Edit]:
    """A keyword argument is dropped."""
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            # zip is strict only of what the code itself has made.
            if keyword.arg not in (None, "strict") and not _DTYPE.search(keyword.arg or ""):
                yield _without(source, node, keyword)


def _dtype(source: Source, node: ast.AST) -> Iterator[Edit]:
    """A dtype is kept: a cast returns what it got, and a tensor is made with the default dtype."""
    if not isinstance(node, ast.Call):
        return
    for keyword in node.keywords:
        if keyword.arg is not None and _DTYPE.search(keyword.arg):
            yield _without(source, node, keyword)
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "type", "float", "half", "type_as"):
        if node.func.attr != "to" or any(_DTYPE.search(source.of(one)) for one in [*node.args, *node.keywords]):
            yield source.whole(node, source.of(node.func.value))
    elif isinstance(node.func, ast.Name) and re.search(r"(^|_)cast_", node.func.id) and len(node.args) > 1:
        # _cast_fp_tensor(dtype, x); typing.cast changes nothing, and others broadcast
        yield source.whole(node, source.of(node.args[-1]))


def _default(source: Source, node: ast.AST) -> Iterator[Edit]:
    """The default of an argument changes; of a private function if a call in the module leaves the argument out."""
    if not isinstance(node, Function):
        return
    places = [*node.args.posonlyargs, *node.args.args]
    defaults = [*zip(places[len(places) - len(node.args.defaults) :], node.args.defaults, strict=True)]
    for argument, default in [*defaults, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]:
        if not _is_left_out(source, node, argument, places):
            continue
        if isinstance(default, ast.Constant) and isinstance(default.value, bool):
            yield source.whole(default, str(not default.value))
        elif _is_number(default):
            assert default is not None
            yield source.whole(default, str(ast.literal_eval(source.of(default)) + 1))


def _is_left_out(source: Source, function: Function, argument: ast.arg, places: Sequence[ast.arg]) -> bool:
    """Whether somebody may call a function without an argument."""
    if not function.name.startswith("_"):
        return True
    number = places.index(argument) if argument in places else len(places)
    for call in _calls(source).get(function.name, ()):
        is_open = any(isinstance(one, ast.Starred) for one in call.args) or any(
            one.arg is None for one in call.keywords
        )
        # A method's first place is the object.
        given = len(call.args) + isinstance(call.func, ast.Attribute) * bool(
            places and places[0].arg in ("self", "cls")
        )
        if not is_open and given <= number and all(one.arg != argument.arg for one in call.keywords):
            return True
    return False


@functools.cache
def _calls(source: Source) -> dict[str, list[ast.Call]]:
    """The calls of a module by the last part of the name of what they call."""
    found = collections.defaultdict(list)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            found[ast.unparse(node.func).rpartition(".")[2]].append(node)
    return found


#: Names of groups, meshes and their dimensions, by the name that is taken for the other.
_GROUPS = (
    ("shard_process_group", "replicate_process_group"), ("_all_reduce_process_group", "_reduce_scatter_process_group"),
    ("_all_gather_process_group", "_reduce_scatter_process_group"), ("all_reduce_group", "reduce_scatter_group"),
    ("shard_mesh_dim", "replicate_mesh_dim"), ("shard_mesh_size", "replicate_mesh_size"),
    ("shard_mesh_rank", "replicate_mesh_rank"), ("shard_pg", "replicate_pg"), ("process_group", "_inter_node_pg"),
    ("intra_node_group", "inter_node_group"), ("shard_group", "across"), ("group", "replicas"), ("group", "across"),
    ("group", "reduce_group"), ("size", "replicate_size"),
)  # fmt: skip
_MADE_OF_GROUPS = re.compile(r"(^|[._])(group|pg|mesh|mesh_dim)$")


def _exchange(source: Source, node: ast.AST, known: frozenset[str]) -> Iterator[Edit]:
    """A group, or a dimension of a mesh, is taken for the other, or two of them exchange their places in a call."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    is_read = isinstance(getattr(node, "ctx", None), ast.Load)
    for pair in _GROUPS:
        # The other name must be one of the module: an error of Python's is no mistake of a group.
        if is_read and name in pair and (other := pair[name == pair[0]]) in known:
            yield source.end(node) - len(name), source.end(node), other
    if isinstance(node, ast.Call):
        given = [*node.args, *(one.value for one in node.keywords)]
        groups = [one for one in given if _MADE_OF_GROUPS.search(source.of(one))]
        for one, other in itertools.pairwise(groups):
            between = source.text[source.end(one) : source.start(other)].decode()
            yield source.start(one), source.end(other), f"{source.of(other)}{between}{source.of(one)}"


Rule = Callable[[Source, ast.AST], Iterator[Edit]]

#: The rules that look at one node, by name. "groups" looks at the names of the module too.
RULES: dict[str, Rule] = {
    "condition": _condition,
    "bound": _bound,
    "statement": _statement,
    "argument": _argument,
    "default": _default,
    "dtype": _dtype,
}
GROUPS_RULE = "groups"
NAMES = (*RULES, GROUPS_RULE)


# The mutants of a module.


@functools.cache
def definitions(source: Source) -> dict[str, tuple[Function, tuple[ast.AST, ...]]]:
    """The functions of a module by their qualified names, each with the classes and functions around it, outer first.

    Of several with one name the last, which overloads and alternatives come before.
    """
    found: dict[str, tuple[Function, tuple[ast.AST, ...]]] = {}

    def walk(node: ast.AST, around: tuple[ast.AST, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = around
            if isinstance(child, Function | ast.ClassDef):
                inner = (*around, child)
                if isinstance(child, Function):
                    found[".".join(one.name for one in inner)] = child, around  # type: ignore[attr-defined]
            walk(child, inner)

    walk(source.tree, ())
    return found


def mutants_of(source: Source, module: str, name: str, reasons: Sequence[coverage.Reason] = ()) -> list[Mutant]:
    """All mutants of a function, in the order of its source; none of one that the module lacks."""
    function = definitions(source).get(name, (None, ()))[0]
    if function is None or function.name in _WITHOUT:
        return []
    rules: dict[str, Rule] = {**RULES, GROUPS_RULE: functools.partial(_exchange, known=_names(source))}
    left_out = [*_unreached(source, f"{module}:{name}", function, reasons)]
    found, counts = dict[tuple[int, str, str], Mutant](), collections.Counter[tuple[str, ...]]()
    for node in [function, *_nodes(function, _checks(source))]:
        if any(node.lineno in lines for lines in left_out if hasattr(node, "lineno")):
            continue
        for rule, edits in rules.items():
            for start, end, new in edits(source, node):
                old = source.text[start:end].decode()
                line = source.text.count(b"\n", 0, start) + 1
                if old != new and (start, old, new) not in found:
                    same = rule, old, new
                    found[start, old, new] = Mutant(f"{module}:{name}", rule, line, start, old, new, counts[same])
                    counts[same] += 1
    return list(found.values())


@functools.cache
def _names(source: Source) -> frozenset[str]:
    nodes = [*ast.walk(source.tree)]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return frozenset(attributes | {node.id for node in nodes if isinstance(node, ast.Name)})


def _unreached(source: Source, place: str, function: Function, reasons: Sequence[coverage.Reason]) -> Iterator[range]:
    """The lines behind branches of a function for which there is a reason why no item takes them."""
    module, _, name = place.partition(":")

    def is_explained(node: ast.stmt, target: ast.stmt) -> bool:
        texts = source.first_line(node), source.first_line(target)
        branch = coverage.Branch(module, name, node.lineno, target.lineno, False, *texts)
        return any(reason.covers(branch) for reason in reasons)

    for outer in ast.walk(function):
        if not isinstance(outer, ast.stmt | ast.ExceptHandler | ast.match_case):
            continue
        for block in (getattr(outer, field, []) for field in ("body", "orelse", "finalbody")):
            for node, following in itertools.pairwise([*block, None]):
                if not isinstance(node, ast.If):
                    continue
                for branch in filter(None, (node.body, node.orelse)):
                    if is_explained(node, branch[0]):
                        yield range(branch[0].lineno, (branch[-1].end_lineno or 0) + 1)
                leaves = isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
                if following is not None and not node.orelse and leaves and is_explained(node, following):
                    yield range(following.lineno, (block[-1].end_lineno or 0) + 1)


def in_order(found: Mapping[str, Iterable[Mutant]], seed: int) -> Iterator[Mutant]:
    """All mutants in the order in which they are drawn, evenly over functions, and in a function over rules.

    Each function gives one mutant before any gives a second one. What one function gives does not depend on the others.
    """
    turns = []
    for place, mutants in found.items():
        drawn = random.Random(f"{seed} {place}")
        by_rule = collections.defaultdict(list)
        for one in mutants:
            by_rule[one.rule].append(one)
        rules = [drawn.sample(same, len(same)) for _, same in sorted(by_rule.items())]
        drawn.shuffle(rules)
        turns.append((drawn.random(), place, [one for turn in itertools.zip_longest(*rules) for one in turn if one]))
    for turn in itertools.zip_longest(*(mutants for *_, mutants in sorted(turns))):
        yield from filter(None, turn)


@functools.cache
def path_of(module: str) -> pathlib.Path | None:
    """The file of a module; None if this torch has no such module."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else pathlib.Path(spec.origin)
