"""The shape of the harness: how much one function decides and one class keeps, counted from the sources by room.

Public names of classes are counted in all of the code but tests, findings and examples: one class, one name.

A function's complexity is 1 and its branches: each ``if`` and conditional expression, loop, ``except``, ``case``,
``assert``, further operand of ``and`` and ``or``, and each ``for`` and ``if`` of a comprehension. What is defined in it
counts by itself. A class's attributes are the names that its methods store in ``self`` and the annotated ones of its
body.
"""

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

#: The rooms of the engine and of its drivers, and the most that a function or a class of theirs has.
ENGINE, LIMIT = ("watching", "judging", "parity", "training"), 15
#: The largest complexity and number of attributes in each other room at commit 6b2d5b63. Rooms made since have LIMIT.
LARGEST: dict[str, tuple[int, int]] = {
    "adapters": (19, 34),
    "collectives": (16, 13),
    "models": (15, 15),
    "planning": (16, 14),
    "plugin": (28, 19),
    "simulation": (14, 10),
    "tensors": (13, 4),
    "worlds": (24, 16),
}

#: Where names of classes are counted, and in how many modules one may be defined.
NAMED, MOST_MODULES = (
    "benchmarks", "docs", "fsdp_impl", "harness", "planted", "reports", "shardproof", "suites",
), 2  # fmt: skip
#: Nouns so general that a second class of one would not be told apart.
ONE_MEANING = {"Diagnosis", "Evidence", "Finding", "Key", "Place", "Request", "Seen", "Trainee"}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ONE_BRANCH = (
    ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case, ast.Assert,
)  # fmt: skip


class Figure(NamedTuple):
    """What is counted of one function or class; the file is named from the folder of the harness."""

    file: str
    line: int
    name: str
    what: str
    value: int

    @property
    def room(self) -> str:
        """The folder of the harness that the file is in, also where it is deeper."""
        return self.file.partition("/")[0]

    def say(self) -> str:
        """Return the place, the name and the figure."""
        return f"harness/{self.file}:{self.line}: {self.name} has {self.what} {self.value}"


def inside(node: ast.AST, apart: tuple[type[ast.AST], ...]) -> Iterator[ast.AST]:
    """The nodes inside of one, without those of the types in `apart` and what is in these."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, apart):
            yield child
            yield from inside(child, apart)


def branches(node: ast.AST) -> int:
    """How many branches a node adds."""
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return int(isinstance(node, ONE_BRANCH))


def complexity(function: ast.AST) -> int:
    """1 and the branches of a function, without those of functions and classes that it defines."""
    return 1 + sum(branches(node) for node in inside(function, (*FUNCTIONS, ast.ClassDef)))


def attributes(owner: ast.ClassDef) -> int:
    """How many names the methods of a class store in ``self``, and its body annotates, each once."""
    found = {one.target.id for one in owner.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    for node in inside(owner, (ast.ClassDef,)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    return len(found)


def figures(file: str, source: str) -> Iterator[Figure]:
    """The figures of all functions and classes of a source."""

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[Figure]:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                inner = (*names, child.name)
                is_class = isinstance(child, ast.ClassDef)
                what, value = ("attributes", attributes(child)) if is_class else ("complexity", complexity(child))
                yield Figure(file, child.lineno, ".".join(inner), what, value)
            yield from visit(child, inner)

    return visit(ast.parse(source), ())


def wrong(sources: Mapping[str, str], largest: Mapping[str, tuple[int, int]]) -> list[str]:
    """What passes the limit of its room, a line each, for {file: source}."""
    found: list[str] = []
    for file, source in sources.items():
        for one in figures(file, source):
            limit = largest.get(one.room, (LIMIT, LIMIT))[one.what == "attributes"]
            if one.value > limit:
                found.append(f"{one.say()}, and the limit is {limit}")
    return found


def sources() -> dict[str, str]:
    folder = ROOT / "harness"
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*/**/*.py"))}


def test_no_function_or_class_passes_the_limit_of_its_room():
    files = sources()
    rooms = {file.partition("/")[0] for file in files}
    assert rooms >= {*ENGINE, *LARGEST}, "a room has moved"
    assert not {*ENGINE} & LARGEST.keys()
    assert wrong(files, LARGEST) == []


def named_alike(sources: Mapping[str, str], most: int, alone: Collection[str]) -> list[str]:
    """Public classes that more modules define than `most`, of the names in `alone` one, a line each.

    Args:
        sources: {file: source}.
    """
    found: dict[str, set[str]] = {}
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(file)
    return [
        f"class {name} is defined in {len(files)} modules, and the limit is {limit}: {', '.join(sorted(files))}"
        for name, files in sorted(found.items())
        if len(files) > (limit := 1 if name in alone else most)
    ]


def test_no_name_is_that_of_several_classes():
    paths = [path for folder in NAMED for path in sorted((ROOT / folder).rglob("*.py")) if not path.is_symlink()]
    found = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    assert {file.partition("/")[0] for file in found} == {*NAMED}, "a folder has moved"
    alike = named_alike(found, MOST_MODULES, ONE_MEANING)
    assert not alike, "\n".join(alike)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("Step Step - _Step", []),
        ("Step Step Step -", ["class Step is defined in 3 modules, and the limit is 2: a/0.py, a/1.py, a/2.py"]),
        ("Place - -", []),
        ("Place - Place", ["class Place is defined in 2 modules, and the limit is 1: a/0.py, a/2.py"]),
        ("_Step _Step _Step", []),
    ],
)
def test_a_name_of_several_classes_is_named(names, said):
    each = [f"def f():\n    class {name}:\n        pass\n" if name != "-" else "" for name in names.split()]
    each[0] *= 2  # a name may be used again in its module
    files = {f"a/{number}.py": source for number, source in enumerate(each)}
    assert named_alike(files, 2, {"Place"}) == said


FUNCTION = '''
class Outer:
    field: int = 0
    other = 1

    def method(self, a, *b):
        """{docstring}"""
        self.field = self.x = a
        self.y: int = 2
        self.y += 1
        a.z = self.read

        def nested():
            self.inner = a and b and a
            return a if b else b

        class Local:
            def deep(self):
                self.hidden = 1

        {body}
'''


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("pass", 1),
        ("return [a for a in b]", 2),
        ("return {a: c for a in b if a for c in a if c if a}", 6),
        ("return a and b and a or b", 4),
        ("return lambda: a if b else self", 2),
        ("assert a", 2),
        ("if a:\n            pass\n        elif b:\n            pass\n        else:\n            pass", 3),
        ("for _ in b:\n            pass\n        else:\n            pass", 2),
        ("while a or b:\n            pass", 3),
        ("try:\n            pass\n        except A:\n            pass\n        except B:\n            pass", 3),
        ("match a:\n            case 1:\n                pass\n            case _:\n                pass", 3),
        ("with a:\n            return b", 1),
    ],
)
def test_what_counts(body, value):
    found = {one.name: one.value for one in figures("a.py", FUNCTION.format(docstring="if for while", body=body))}
    assert found == {
        "Outer": 4,  # field, x, y and inner
        "Outer.method": value,
        "Outer.method.nested": 4,
        "Outer.method.Local": 1,
        "Outer.method.Local.deep": 1,
    }


def function(branches, name="f"):
    return f"def {name}(a):\n" + "    if a:\n        pass\n" * branches


def fields(count):
    return "class C:\n" + "".join(f"    x{number}: int\n" for number in range(count))


@pytest.mark.parametrize(
    ("file", "source", "said"),
    [
        ("training/a.py", function(14), []),
        ("training/a.py", fields(15), []),
        ("training/a.py", "\n" + function(15), ["harness/training/a.py:2: f has complexity 16, and the limit is 15"]),
        ("watching/b.py", fields(16), ["harness/watching/b.py:1: C has attributes 16, and the limit is 15"]),
        ("attic/deep/a.py", function(20) + fields(3), []),
        ("attic/deep/a.py", function(21) + fields(4),
         ["harness/attic/deep/a.py:1: f has complexity 22, and the limit is 21",
          "harness/attic/deep/a.py:44: C has attributes 4, and the limit is 3"]),
        ("cellar/a.py", function(15), ["harness/cellar/a.py:1: f has complexity 16, and the limit is 15"]),
    ],
)  # fmt: skip
def test_what_passes_a_limit_is_named(file, source, said):
    assert wrong({file: source}, {"attic": (21, 3)}) == said
