"""The places in ``fsdp_impl`` that issue a collective or make a process group, found in its source."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

#: Of ``torch.distributed``, what asks nobody else. Any other call is a place.
LOCAL = {"get_debug_level", "get_process_group_ranks", "get_rank", "get_world_size", "is_initialized"}
#: Calls by the last name of what is called, wherever it comes from.
ISSUES = {
    "DeviceMesh",
    "concatenate_meshes",
    "flatten_mesh",
    "from_group",
    "full_tensor",
    "init_device_mesh",
    "redistribute",
}
#: Functions of the user in place of a collective.
ISSUES |= {"all_reduce_hook", "comm", "hook", "reduce_scatter"}
#: Functions of the reference that lead to a collective: who calls one decides whether it is issued.
LEADS = {
    "_agree", "_broadcast", "_compare_ranks", "_from_first_rank", "_gather", "_mesh_of", "_merge", "_one_dim",
    "_reduce_over", "_smaller_mesh", "_whole", "_whole_states", "before_gather", "check_replicas", "check_same_params",
    "combine_over_ranks", "concatenate", "gather_full", "reduce_norm", "sharded_copy", "sync_states", "unshard",
    "whole_copy", "whole_values", "SymmetricMemory", "WholeGradients",
}  # fmt: skip
#: The same, of names that others have too: by what stands before the name.
QUALIFIED = {
    "collectives.all_reduce", "collectives.gather", "collectives.reduce", "dtensor.whole", "order.end",
    "self.iteration.order.end", "self._reduce_scatter", "reducer.reduce", "self.reducer.reduce",
}  # fmt: skip


class Place(NamedTuple):
    """A call in a function, by its file from ``fsdp_impl``, the function's qualified name and the text of the call."""

    file: str
    function: str
    callee: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function} calls {self.callee}"


def places() -> set[Place]:
    """All in ``fsdp_impl``."""
    folder = ROOT / "fsdp_impl"
    found: set[Place] = set()
    for path in sorted(folder.rglob("*.py")):
        file = str(path.relative_to(folder))
        found |= {Place(file, *call) for call in _calls(ast.parse(path.read_text()), "") if _is_place(call[1])}
    return found


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inside = function
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside = f"{function}.{child.name}".lstrip(".")
        elif isinstance(child, ast.Call):
            yield function, ast.unparse(child.func)
        yield from _calls(child, inside)


def _is_place(callee: str) -> bool:
    if callee.startswith("getattr(dist, "):
        return True
    before, _, name = callee.rpartition(".")
    if before == "dist":
        return name not in LOCAL
    return name in ISSUES | LEADS or callee in QUALIFIED
