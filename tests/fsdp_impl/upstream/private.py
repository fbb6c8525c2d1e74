"""Which private names of torch's FSDP a test uses, read from its source: nothing is typed by hand, and nothing is run.

A private name is a path in ``torch.distributed.fsdp`` with a component that begins with an underscore, unless it is a
public name under another path, and an attribute with an underscore that the files of ``torch.distributed.fsdp`` define
and that neither modules nor tensors have. A test uses what it names itself and what the helpers name that it calls: of
its file, of its class, and of ``torch.testing``.
"""

import ast
import functools
import importlib.util
import pathlib
from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from tests.fsdp_impl.upstream import exchange

_FSDP = "torch.distributed.fsdp"
_TESTING = "torch.testing"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class _File:
    """The definitions of a file: what its names are bound to by imports, its functions and its classes."""

    def __init__(self, text: str) -> None:
        tree = ast.parse(text)
        self.imports = dict(_imports(tree.body))
        self.functions = {node.name: node for node in tree.body if isinstance(node, _Function)}
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def methods(self, name: str) -> dict[str, _Function]:
        """Return the methods of a class by name, with those of its bases in this file."""
        found: dict[str, _Function] = {}
        node = self.classes.get(name)
        if node is not None:
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id != name:
                    found |= self.methods(base.id)
            found |= {one.name: one for one in node.body if isinstance(one, _Function)}
        return found


def names_by_test(text: str) -> dict[str, frozenset[str]]:
    """Return, by ``Class.method`` as it is written in a file's text, the private names that the test uses."""
    file = _File(text)
    found = {}
    for kind in file.classes:
        methods = file.methods(kind)
        shared = _Reader().of_method(file, kind, "setUp") if "setUp" in methods else frozenset()
        for name in methods:
            if name.startswith("test"):
                found[f"{kind}.{name}"] = shared | _Reader().of_method(file, kind, name)
    return found


def written_name(test: str, written: Mapping[str, object]) -> str | None:
    """Return the test of a file from which ``Class.method`` was made: torch appends devices and parameters to both."""
    kind, _, method = test.partition(".")
    fitting = [
        one for one in written if kind.startswith(one.partition(".")[0]) and method.startswith(one.partition(".")[2])
    ]
    return max(fitting, key=len, default=None)


class _Reader:
    """Collects the private names that definitions use, and follows what they call."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._seen: set[int] = set()

    def of_method(self, file: _File, kind: str, name: str) -> frozenset[str]:
        self._follow(file, kind, file.methods(kind)[name])
        return frozenset(self._names)

    def _follow(self, file: _File, kind: str, node: ast.AST) -> None:
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        bound = file.imports | dict(_imports(ast.walk(node)))
        for path in bound_and_used(node, bound):
            self._path(path)
        for one in ast.walk(node):
            if isinstance(one, ast.Attribute):
                self._attribute(file, kind, one)
            elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load):
                self._name(file, one.id)
            elif isinstance(one, ast.Call):
                self._call(one)

    def _path(self, path: str) -> None:
        if path.startswith(_TESTING):
            home, _, name = path.rpartition(".")
            helper = _testing_file(home)
            if helper is not None:
                for node in (helper.functions.get(name), helper.classes.get(name)):
                    if node is not None and not name.startswith("FSDPTest"):
                        self._follow(helper, name, node)
        elif _is_private(path):
            self._names.add(path)

    def _attribute(self, file: _File, kind: str, node: ast.Attribute) -> None:
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if own and node.attr in (methods := file.methods(kind)):
            self._follow(file, kind, methods[node.attr])
        elif not own and node.attr in private_attributes():
            self._names.add(f".{node.attr}")

    def _name(self, file: _File, name: str) -> None:
        for found in (file.functions.get(name), file.classes.get(name)):
            if found is not None:
                self._follow(file, name, found)

    def _call(self, node: ast.Call) -> None:
        """Read names that are written as strings: of ``getattr``, ``mock.patch`` and ``mock.patch.object``."""
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("getattr", "setattr", "hasattr", "patch", "object"):
            for given in node.args:
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    if given.value in private_attributes():
                        self._names.add(f".{given.value}")
                    elif _is_private(given.value):
                        self._names.add(given.value)


def bound_and_used(node: ast.AST, bound: Mapping[str, str]) -> Iterator[str]:
    """Return the full paths of names that a definition uses and that imports have bound, longest chains as written."""
    inner = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute):
            chain, root = [one.attr], one.value
            while isinstance(root, ast.Attribute):
                inner.add(root)
                chain.insert(0, root.attr)
                root = root.value
            if one not in inner and isinstance(root, ast.Name) and root.id in bound:
                yield ".".join([bound[root.id], *chain])
        elif isinstance(one, ast.Name) and one.id in bound:
            yield bound[one.id]


def _imports(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]


def _is_private(path: str) -> bool:
    parts = path.removeprefix(f"{_FSDP}.").split(".")
    if not path.startswith(f"{_FSDP}.") or not any(part.startswith("_") for part in parts):
        return False
    # A public name under a private path is exchanged there too.
    return not any(part in _public() for part in parts)


@functools.cache
def _public() -> frozenset[str]:
    return frozenset(exchange.pairs())


@functools.cache
def private_attributes() -> frozenset[str]:
    """Return the attributes with an underscore that torch's FSDP defines, less those of modules and tensors."""
    found: set[str] = set()
    spec = importlib.util.find_spec(_FSDP)
    assert spec is not None and spec.origin is not None
    for path in pathlib.Path(spec.origin).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, _Function):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    others = set(dir(torch.nn.Module())) | set(dir(torch.Tensor)) | set(dir(DTensor))
    return frozenset(name for name in found - others if name.startswith("_") and not name.endswith("__"))


@functools.cache
def _testing_file(module: str) -> _File | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return _File(pathlib.Path(spec.origin).read_text())
