"""Import of a case's module in a rank, under the controller's name and with pytest's assertion rewriting."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import sys
import types

from _pytest.assertion.rewrite import rewrite_asserts


def load(name: str, path: pathlib.Path) -> types.ModuleType:
    """Import a case's module, once per process.

    A failing bare ``assert`` shows its operands, as it does in the controller. The module is registered in
    ``sys.modules`` under the controller's name, so that objects that the controller pickled by reference to that name
    can be unpickled here.

    Args:
        name: the name under which the controller imported the module.
        path: the module's source file.

    Returns:
        The module; the one already imported, if ``name`` was loaded from ``path`` before.

    Raises:
        Exception: any exception that the module's own code raises.
    """
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    source = path.read_bytes()
    tree = ast.parse(source, filename=str(path))
    rewrite_asserts(tree, source, str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(compile(tree, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module
