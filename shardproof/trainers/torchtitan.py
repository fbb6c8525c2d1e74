"""A hook for torchtitan's trainer, whose model specification calls a function once the optimizers are made."""

import contextlib
from typing import Any


def watching(spec: Any, watcher: contextlib.AbstractContextManager[Any]) -> None:
    """Let a ``ModelSpec`` enter a doctor or a recording when the trainer has made model and optimizers.

    Args:
        spec: its own ``post_optimizer_build_fn`` is still called, before.
        watcher: what ``shardproof.doctor()`` or ``shardproof.record(out=...)`` returns. Give it no model.
    """
    before = spec.post_optimizer_build_fn

    def enter(*args: Any) -> None:
        if before is not None:
            before(*args)
        watcher.__enter__()

    spec.post_optimizer_build_fn = enter
