"""Runs a training script, or a module, as ``python`` would, inside of this process."""

import contextlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator, Sequence

from shardproof.harness.watching.records import NotWatchable


def run(arguments: Sequence[str]) -> None:
    """Run ``[FILE, ARGS...]`` or ``["-m", MODULE, ARGS...]``; its exceptions, and an exit with an error, pass through.

    Raises:
        NotWatchable: there is no such file, or nothing is named; in one line.
    """
    if not arguments or (arguments[0].startswith("-") and arguments[0] != "-m"):
        raise NotWatchable(f"{arguments[0] if arguments else 'nothing'}: name a script, or -m and a module")
    if arguments[0] == "-m":
        if len(arguments) < 2:
            raise NotWatchable("-m: name a module")
        sys.argv = list(arguments[1:])
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        if not _is_there(arguments[1]):
            raise NotWatchable(f"{arguments[1]}: there is no such module")
        with _to_its_end():
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    path = arguments[0]
    if not os.path.isfile(path):
        raise NotWatchable(f"{path}: there is no such script")
    sys.argv = list(arguments)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    with _to_its_end():
        runpy.run_path(path, run_name="__main__")


@contextlib.contextmanager
def _to_its_end() -> Iterator[None]:
    """Let a script that exits without an error, as by ``sys.exit(main())``, have come to its end."""
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:  # of a package above it
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        return False
