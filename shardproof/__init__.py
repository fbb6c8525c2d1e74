"""Conformance of sharded data parallel training in PyTorch: the one package under which everything is imported.

``harness``, ``suites`` and ``reports`` are links to the folders of the same names in the root of a clone; in an
installation they are folders. ``testing`` is what cases import, ``plugin`` what a project's conftest names in
``pytest_plugins``; ``commands`` has the commands, and ``__main__`` calls them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardproof.harness.states.receiving import views as views
    from shardproof.harness.states.snapshot import state as state
    from shardproof.harness.training.doctor import doctor as doctor
    from shardproof.harness.training.recording import record as record
    from shardproof.harness.training.starting import check as check


_MODULES = {
    "doctor": "training.doctor", "record": "training.recording", "check": "training.starting",
    "state": "states.snapshot", "views": "states.receiving",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what user code calls when it is first asked for: reports need no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'shardproof' has no attribute {name!r}")
    return getattr(importlib.import_module(f"shardproof.harness.{_MODULES[name]}"), name)
