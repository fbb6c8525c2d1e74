"""What a program of plain torch takes along of the harness and of a case: the sources of models and losses."""

import ast
import inspect
import sys
import textwrap
import types
from typing import Any

#: The modules from which users import torch's names.
_PUBLIC = ("nn", "optim", "nn.utils", "distributed.fsdp", "distributed.checkpoint.state_dict", "distributed.tensor",
           "distributed.tensor.parallel", "utils.checkpoint", "optim.lr_scheduler")  # fmt: skip


class Unwritable(Exception):
    """Something has no expression of plain torch; says what, in a few words."""


class Sources:
    """Imports, and the sources of what is not torch's, by name."""

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.texts: dict[str, str] = {}

    def name(self, value: Any) -> str:
        """The name of a class or a function in the program, which then has what it takes."""
        module, name = str(value.__module__), str(value.__qualname__)
        if module.partition(".")[0] == "torch":
            found = ((f"torch.{one}", getattr(sys.modules.get(f"torch.{one}"), name, None)) for one in _PUBLIC)
            known = ((module, name), *((place, name) for place in (f"torch.{one}" for one in _PUBLIC)))
            place = next((at for at, one in found if (getattr(one, "__module__", ""), name) in known), module)
            if place in ("torch.nn", "torch.optim"):
                return f"{place.replace('torch.nn', 'nn')}.{name}"
            self.imports.add(f"from {place} import {name}")
            return name
        if not module.startswith("shardproof") and module in sys.stdlib_module_names:
            self.imports |= {f"import {module}"} - {"import builtins"}
            return name if module == "builtins" else f"{module}.{name}"
        if "<" in name or "." in name:
            raise Unwritable(f"{name} is defined within another function")
        if name not in self.texts:
            self.texts[name] = ""  # it may name itself
            tree = _Plain(self, vars(sys.modules[module])).visit(ast.parse(textwrap.dedent(inspect.getsource(value))))
            del self.texts[name]
            self.texts[name] = ast.unparse(ast.fix_missing_locations(tree))
        return name


class _Plain(ast.NodeTransformer):
    """Takes docstrings and annotations out of a source, and brings what it names along."""

    def __init__(self, sources: Sources, values: dict[str, Any]) -> None:
        self._sources, self._values = sources, values

    def visit_FunctionDef(self, node: Any) -> Any:
        node.returns = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> Any:
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        return None if node.value is None else self.generic_visit(ast.Assign([node.target], node.value))

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        owner = self._values.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if isinstance(owner, types.ModuleType) and owner.__name__.startswith("shardproof"):
            return ast.Name(self._sources.name(getattr(owner, node.attr)), node.ctx)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        value = self._values.get(node.id)
        if isinstance(value, types.ModuleType):
            if node.id not in ("torch", "nn"):
                self._sources.imports.add(f"import {value.__name__} as {node.id}")
        elif isinstance(value, type) or inspect.isroutine(value):
            return ast.parse(self._sources.name(value), mode="eval").body
        elif node.id in self._values and isinstance(node.ctx, ast.Load):
            if not isinstance(value, str | int | float | tuple | list | dict | None):
                raise Unwritable(f"{node.id} is a {type(value).__name__}")
            self._sources.texts.setdefault(node.id, f"{node.id} = {value!r}")
        return node
