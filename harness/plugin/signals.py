"""SIGTERM and SIGHUP end a run as Ctrl-C does: worlds are stopped and the run file names the reason."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """A signal asked the process to end; the message is the signal's name.

    pytest ends a run on KeyboardInterrupt, and no ``except Exception`` on the way swallows it.
    """


class EndingSignals:
    """Handlers of the signals that ask a process to end, until they are restored."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Handle the signals that have their default effect.

        A handler that another plugin has set, and a signal that is ignored as under ``nohup``, are left alone.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._before[number] = signal.signal(number, _end)

    def restore(self) -> None:
        """Restore the handlers that :meth:`install` replaced."""
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, before)


def _end(number: int, frame: FrameType | None) -> None:
    # A second signal ends the process at once, whatever it is waiting for.
    for each in _SIGNALS:
        if signal.getsignal(each) is _end:
            signal.signal(each, signal.SIG_DFL)
    raise Ended(signal.Signals(number).name)
