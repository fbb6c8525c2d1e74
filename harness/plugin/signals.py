"""Signals that end a run: SIGTERM and SIGHUP do it as Ctrl-C does.

Worlds are stopped and the run file names the reason. A second signal, also one while the process exits, ends it at
once.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any, NoReturn

from shardproof import garbage
from shardproof.harness.worlds import forkserver, scratch

_CAUGHT = {
    signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL,
}  # fmt: skip


class Ended(KeyboardInterrupt):
    """A signal asked the process to end; the message is the signal's name.

    pytest ends a run on KeyboardInterrupt, and no ``except Exception`` on the way swallows it.
    """


class EndingSignals:
    """Handlers of the signals that ask a process to end, until they are restored; ``has_ended``: one has asked it."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self.has_ended = False

    def install(self) -> None:
        """Handle the signals that have their default effect.

        A handler that another plugin has set, and a signal that is ignored as under ``nohup``, are left alone.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        garbage.retire_at_exit()
        for number, default in _CAUGHT.items():
            if signal.getsignal(number) is default:
                self._before[number] = signal.signal(number, self._end)

    def restore(self) -> None:
        """Restore the handlers that :meth:`install` replaced, unless the process has been asked to end."""
        while self._before and not self.has_ended:
            number, before = self._before.popitem()
            signal.signal(number, before)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self.has_ended:
            _end_at_once(number)
        self.has_ended = True
        raise KeyboardInterrupt if number == signal.SIGINT else Ended(signal.Signals(number).name)


def _end_at_once(number: int) -> NoReturn:
    """End this process by a signal, with its ranks and without its directory."""
    for each in _CAUGHT:  # a third signal needs no handler
        signal.signal(each, signal.SIG_DFL)
    forkserver.kill()
    scratch.remove_at_once()
    os.kill(os.getpid(), number)
    raise AssertionError("unreachable: the signal has its default effect")
