"""Brings one bug of the past back into a package while a process imports it; nothing on the disk changes.

``hook/sitecustomize.py``, first on PYTHONPATH, calls :func:`install` in every process, ranks and their forkserver too.
"""

import ast
import importlib.abc
import importlib.machinery
import json
import os
import sys
from typing import Any

#: The environment variable with the edit: module, function, old text and new text, as JSON.
VARIABLE = "SHARDPROOF_UPSTREAM"


def edited(source: str, function: str, old: str, new: str) -> str:
    """A module's source after the edit; ValueError if the function's text does not have the old text exactly once."""
    node: Any = ast.parse(source)
    for name in function.split("."):
        level, named = [node], []
        while level and not named:
            level = [child for one in level for child in ast.iter_child_nodes(one)]
            named = [one for one in level if getattr(one, "name", None) == name and hasattr(one, "decorator_list")]
        if not named:
            raise ValueError(f"there is no {function}")
        node = named[-1]  # the overloads of a function come before it
    lines = source.split("\n")
    first, end = min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1, node.end_lineno
    text = "\n".join(lines[first:end])
    if (count := text.count(old)) != 1:
        raise ValueError(f"{function} has {old!r} {count} times instead of once")
    made = "\n".join([*lines[:first], text.replace(old, new), *lines[end:]])
    compile(made, function, "exec", dont_inherit=True)
    return made


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        """Compile the edited source, past the cache of bytecode."""
        _, *edit = json.loads(os.environ[VARIABLE])
        source = self.get_source(fullname)
        assert source is not None
        return compile(edited(source, *edit), self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Called by the import system."""
        if fullname != json.loads(os.environ.get(VARIABLE, "[0]"))[0]:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def install() -> None:
    """Edit the module of :data:`VARIABLE` when it is imported."""
    sys.meta_path.insert(0, _Finder())
