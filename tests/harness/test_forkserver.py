"""The forkserver starts with an environment of its own, and leaves that of the process as it was."""

from __future__ import annotations

import os
import threading

from shardproof.harness.worlds import forkserver

NAME = "CUBLAS_WORKSPACE_CONFIG"


def test_threads_that_start_it_together_restore_the_environment(monkeypatch):
    """Before, the second saw the variables of the first, which the first had removed when the second did."""
    monkeypatch.delenv(NAME, raising=False)
    inside, most, errors = [], [], []
    entered = threading.Event()

    def running():
        inside.append(os.environ[NAME])
        most.append(len(inside))
        # Time for the other thread, which is inside too unless it waits.
        entered.wait(0.3)
        inside.pop()

    def start():
        try:
            forkserver.start()
        except KeyError as error:
            errors.append(error)

    monkeypatch.setattr(forkserver.forkserver, "ensure_running", running)
    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, errors, NAME in os.environ) == ([1, 1], [], False)
