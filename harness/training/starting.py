"""Starts a check from Python: the command in a process of its own, of which the record comes back."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from shardproof.door import BadFile
from shardproof.runfile import CaseRecord, load_run

BAD_INPUT = 2


def check(model: Any, *, mesh: str, report: str | os.PathLike[str] | None = None, **options: Any) -> CaseRecord:
    """Check a training, as ``shardproof check`` does, and return the record of its run file.

    Args:
        model: as the option ``--model``, or a function that can be imported; so are ``parallelize``, ``optimizer``,
            ``data``, ``step`` and ``plain``.
        mesh: as the option ``--mesh``.
        report: where the run file stays.
        **options: the other options of the command, with underscores.

    Raises:
        ValueError: what cannot be checked, in one line.
    """
    words = ["--mesh", mesh]
    for name, value in {"model": model, **options}.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [option] if value else []
        elif name == "axis":
            words += [word for key, one in dict(value).items() for word in (option, f"{key}={json.dumps(one)}")]
        elif value is not None:
            words += [option, name_of(value) if callable(value) else str(value)]
    with tempfile.TemporaryDirectory(prefix="shardproof-check-") as folder:
        path = str(report or os.path.join(folder, "run.json"))
        command = [sys.executable, "-m", "shardproof", "check", *words, "--report", path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        record = record_of(path) if done.returncode != BAD_INPUT else None
    if record is None:
        raise ValueError(
            (done.stderr.strip().splitlines() or ["check: there is no record"])[-1].removeprefix("shardproof ")
        )
    return record


def name_of(function: Callable[..., Any]) -> str:
    """Return ``module:function`` or ``file.py:function`` for a function; a ValueError for one that has no such name."""
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" and file is None:
        raise ValueError(f"check: {name}() is defined in a cell of a notebook: write the cell to a file by %%writefile "
                         "my.py and import it")  # fmt: skip
    if not name.isidentifier() or not module:
        raise ValueError(f"check: {name or function!r} is not at the top of a module: give one that can be imported")
    if module == "__main__":
        return f"{os.path.abspath(str(file))}:{name}"
    if getattr(importlib.import_module(module), name, None) is not function:
        raise ValueError(f"check: {module}:{name} is another function: give one that can be imported")
    return f"{module}:{name}"


def record_of(report: str) -> CaseRecord | None:
    """Return the record of a check; None where there is none."""
    with contextlib.suppress(BadFile):
        return next(iter(load_run(report).cases), None)
    return None
