"""The modules of shardproof's own suites, under one name wherever pytest finds them.

A clone has the suites in its root, an installation inside the package, and a clone reaches them through a link as well.
pytest would name a module by the path that it was given; two names for one file are two modules.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from _pytest.python import importtestmodule

import shardproof

_PACKAGED = pathlib.Path(shardproof.__file__).parent / "suites"
_REAL = _PACKAGED.resolve()


class SuiteModule(pytest.Module):
    """A file of cases of shardproof's own; always imported as ``shardproof.suites.<name>``."""

    def _getobj(self) -> Any:
        return importtestmodule(_PACKAGED / self.path.name, self.config)


def is_suites(directory: pathlib.Path) -> bool:
    """Whether the directory is that of shardproof's own suites."""
    return directory.resolve() == _REAL
