"""What a program of plain torch takes along of the harness and of a case: the sources of models and losses."""

import ast
import inspect
import sys
import textwrap
import types
from typing import Any

#: The modules from which users import torch's names.
_PUBLIC = ("nn", "optim", "nn.utils", "distributed.fsdp", "distributed.tensor", "distributed.tensor.parallel",
           "distributed.checkpoint.state_dict", "utils.checkpoint", "optim.lr_scheduler")  # fmt: skip


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
            places = [f"torch.{one}" for one in _PUBLIC]
            place = next((one for one in places if hasattr(sys.modules.get(one), name)), module)
            if place in ("torch.nn", "torch.optim"):
                return f"{place.replace('torch.nn', 'nn')}.{name}"
            self.imports.add(f"from {place} import {name}")
            return name
        if module in sys.stdlib_module_names or "<" in name or "." in name:
            raise Unwritable(f"{name} is neither torch's nor defined at the top of a file of cases or models")
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

    def visit_ClassDef(self, node: Any) -> Any:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: Any) -> Any:
        node.returns = None
        return self.visit_ClassDef(node)

    def visit_arg(self, node: ast.arg) -> Any:
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        return None if node.value is None else self.generic_visit(ast.Assign([node.target], node.value))

    def visit_Name(self, node: ast.Name) -> Any:
        value = self._values.get(node.id)
        if isinstance(value, types.ModuleType):
            if value.__name__.startswith("shardproof"):
                raise Unwritable(f"a source names the module {node.id}")
            if node.id not in ("torch", "nn"):
                self._sources.imports.add(f"import {value.__name__} as {node.id}")
        elif isinstance(value, type) or inspect.isroutine(value):
            return ast.parse(self._sources.name(value), mode="eval").body
        return node
