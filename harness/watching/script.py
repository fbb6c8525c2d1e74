"""Runs a training script, or a module, as ``python`` would, inside of this process."""

import contextlib
import importlib.util
import os
import pathlib
import re
import runpy
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardproof.harness.watching.records import NotWatchable

#: The folders of this package, under the names by which its files are imported.
OWN = tuple({str(pathlib.Path(__file__).parents[2]), str(pathlib.Path(__file__).resolve().parents[1])})

#: The folder of torch, and the modules there that begin collectives and wait for them.
_TORCH = f"{pathlib.Path(torch.__file__).parent}{os.sep}"
_COLLECTIVES = tuple(f"distributed{os.sep}{name}.py" for name in ("distributed_c10d", "_functional_collectives"))
_IN_VAIN = re.compile(r"timed? ?out|connection", re.IGNORECASE)


def without_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback of user code's exception without the frames of what watches it, and of how it was started."""
    if trace is None:
        return None
    rest, file = without_own_frames(trace.tb_next), trace.tb_frame.f_code.co_filename
    if file.startswith(OWN) or file in ("<frozen runpy>", runpy.__file__):
        return rest
    return types.TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def collective_of(error: BaseException) -> str:
    """Return which line of user code began the collective in which a rank has waited in vain; empty if it was none."""
    if not isinstance(error, RuntimeError) or not _IN_VAIN.search(str(error)):
        return ""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = max((n for n, (code, _) in enumerate(frames) if not code.co_filename.startswith(_TORCH)), default=-1)
    if own < 0 or not any(code.co_filename.endswith(_COLLECTIVES) for code, _ in frames[own + 1 :]):
        return ""
    code, line = frames[own]
    name = "" if code.co_name.startswith("<") else f" in {code.co_name}()"
    return f"{os.path.basename(code.co_filename)}:{line}{name}"


def run(arguments: Sequence[str]) -> None:
    """Run ``[FILE, ARGS...]`` or ``["-m", MODULE, ARGS...]``; its exceptions, and an exit with an error, pass through.

    Raises:
        NotWatchable: there is no such file, or nothing is named; in one line.
    """
    if not arguments or (arguments[0].startswith("-") and arguments[0] != "-m"):
        raise NotWatchable(f"{arguments[0] if arguments else 'nothing'}: name a script, or -m and a module")
    sys.excepthook = _ExceptHook(sys.excepthook)
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


class _ExceptHook:
    """Prints the exception of a script as if ``python`` had run it."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        self._before(kind, error.with_traceback(without_own_frames(trace)), error.__traceback__)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:  # of a package above it
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        return False
