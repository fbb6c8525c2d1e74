"""Which names of torch the source uses, read from its trees."""

import ast
import os

from tests.harness.inner import PYTHONPATH, ROOT

#: With what hides a name of torch from whoever is not torch.
HIDING = f"{ROOT / 'tests/hiding'}{os.pathsep}{PYTHONPATH}"


def nodes_of(source):
    """All nodes of a file: to walk over the trees again for each question takes longer than to parse them."""
    return list(ast.walk(ast.parse(source)))


def imported_from_torch(nodes):
    """The names that a file binds to something of torch: {name: path}."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def path_of(node, bound):
    """The path of torch that an expression reads, by what its file has bound; None if it reads none."""
    match node:
        case ast.Name(id=name):
            return bound.get(name)
        case ast.Call(func=ast.Name(id="cast"), args=[_, value]):
            return path_of(value, bound)
        case ast.Attribute(value=value, attr=name):
            owner = path_of(value, bound)
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[value, ast.Constant(value=str(name)), *_]):
            owner = path_of(value, bound)
        case _:
            return None
    return None if owner is None else f"{owner}.{name}"


def paths_of_torch(nodes):
    """Each path of torch that a file imports or reads, with its line: (line, path)."""
    bound = imported_from_torch(nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, one.name) for one in node.names if one.name.partition(".")[0] == "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from ((node.lineno, f"{node.module}.{one.name}") for one in node.names)
        elif isinstance(node, ast.Attribute | ast.Call) and (path := path_of(node, bound)) is not None:
            yield node.lineno, path


def files_of(*folders):
    """The nodes of each file of ours in these folders, by its path."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    paths = sorted(path for path in files if "shardproof/" not in str(path.parent))
    return {str(path.relative_to(ROOT)): nodes_of(path.read_text()) for path in paths}
