"""shardproof's own suites: the files, and their import under one name, wherever pytest finds them.

A clone has the suites in its root directory and, through a link, inside the package; an installation has them only
inside the package. pytest would name a module after the path on the command line, and one file under two names would
be two modules.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
from _pytest.python import importtestmodule

import shardproof

_PACKAGED = pathlib.Path(shardproof.__file__).parent / "suites"
SUITES = _PACKAGED.resolve()
_OWN = pathlib.Path(shardproof.__file__).parent / "own"


class SuiteModule(pytest.Module):
    """A file of shardproof's own suites, always imported as ``shardproof.suites.<name>``."""

    def _getobj(self) -> Any:
        return importtestmodule(_PACKAGED / self.path.name, self.config)


def is_suites(directory: pathlib.Path) -> bool:
    """Return whether the directory is that of shardproof's own suites, directly or through a link."""
    return directory.resolve() == SUITES


def are_own(arguments: Sequence[str]) -> bool:
    """Return whether arguments of pytest name the case of ``shardproof check`` alone, which needs no suite."""
    return bool(arguments) and all(pathlib.Path(one).parent == _OWN for one in arguments)


def files() -> dict[str, pathlib.Path]:
    """Return the files that decide what shardproof's own suites ask and expect, by their names in run files."""
    found = (path for pattern in ("*.py", "*.toml") for path in SUITES.rglob(pattern))
    return {f"{SUITES.name}/{path.relative_to(SUITES).as_posix()}": path for path in found}


def has(file: pathlib.PurePath) -> bool:
    """Return whether shardproof's own suites have a file of this path, which begins with their folder."""
    return (SUITES.parent / file).is_file() and file.parent == pathlib.PurePath(SUITES.name)
