"""A callback for Lightning's Trainer and for Fabric."""

import contextlib
from typing import Any

from lightning.pytorch import Callback


class Watching(Callback):  # type: ignore[misc]
    """Enters a doctor or a recording when training begins, and leaves it when training ends or an exception ends it.

    Fabric calls it where the loop does: ``fabric.call("on_train_start")`` and ``fabric.call("on_train_end")``.

    Args:
        watcher: what ``shardproof.doctor()`` or ``shardproof.record(out=...)`` returns. Give it no model: it watches
            the module that the loop calls, which the strategy makes.
    """

    def __init__(self, watcher: contextlib.AbstractContextManager[Any]) -> None:
        self._watcher = watcher

    def on_train_start(self, *args: Any, **kwargs: Any) -> None:
        """Begin to watch."""
        self._watcher.__enter__()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Report, where the training is shorter than what is watched."""
        self._watcher.__exit__(None, None, None)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Leave the training to its exception."""
        self._watcher.__exit__(type(exception), exception, exception.__traceback__)
