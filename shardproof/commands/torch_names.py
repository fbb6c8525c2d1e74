"""The command ``shardproof torch-names``: which private names the installed torch lacks, and what that stops."""

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from shardproof import commands

MISSING = 1
BAD_USAGE = 2

#: The files that list private names of torch; they have one interface.
_TABLES = {"the harness": "shardproof.harness.tensors.private", "the reference": "fsdp_impl.common.private"}

_EPILOG = """\
exit codes: 0 torch has every name; 1 it lacks one; 2 an argument is not valid"""


def torch_names(arguments: Sequence[str]) -> int:
    """Print the private names of torch that the harness or the reference use and the installed torch lacks.

    The exit code is 0 if no name is missing, 1 if one is, or 2 for an argument, with one line on stderr.
    """
    parser = commands.parser(
        "shardproof torch-names",
        description="Look for the private names of torch that shardproof uses, and print those that the installed "
        "torch lacks, with the purpose of each and the consequence of its absence. A missing name stops no run.",
        epilog=_EPILOG,
    )
    if unknown := parser.parse_known_args(arguments)[1]:
        print(f"shardproof torch-names: {unknown[0]!r} is no argument of it; it takes none", file=sys.stderr)
        return BAD_USAGE
    import torch

    lacks = False
    for user, path in _TABLES.items():
        table = _imported(path)
        if table is None:
            continue
        missing = table.missing()
        lacks = lacks or bool(missing)
        print(f"torch {torch.__version__} lacks {len(missing)} of {len(table.NAMES)} private names that {user} uses")
        for name in missing:
            print(f"  {name.path}\n    for {name.purpose}; without it: {name.without}")
    return MISSING if lacks else 0


def _imported(path: str) -> ModuleType | None:
    try:
        return importlib.import_module(path)
    except Exception:  # a torch that lacks a name may raise anything here
        return None
