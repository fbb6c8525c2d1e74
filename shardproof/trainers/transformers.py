"""A callback for transformers' Trainer and what is built on it."""

import contextlib
from typing import Any

from transformers import TrainerCallback


class Watching(TrainerCallback):  # type: ignore[misc]
    """Enters a doctor or a recording when training begins, and leaves it when training ends.

    Args:
        watcher: what ``shardproof.doctor()`` or ``shardproof.record(out=...)`` returns. Give it no model: it watches
            the module that the trainer calls, which is made later.
    """

    def __init__(self, watcher: contextlib.AbstractContextManager[Any]) -> None:
        self._watcher = watcher

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin to watch."""
        self._watcher.__enter__()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Report, where the training is shorter than what is watched."""
        self._watcher.__exit__(None, None, None)
