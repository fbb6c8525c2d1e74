"""What does not count as left behind; test_chaos.py has what does."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from harness import leftovers

CPU = torch.device("cpu")


@pytest.fixture
def sleeper():
    """Starts a thread of a name, which ends with the test."""
    done = threading.Event()
    threads = []

    def start(name):
        threads.append(threading.Thread(target=done.wait, name=name, daemon=True))
        threads[-1].start()

    yield start
    done.set()
    for thread in threads:
        thread.join()


def left_behind(before):
    return leftovers.differences(before, leftovers.picture(CPU, groups=0), first_use=False)


def test_what_torch_compile_keeps_for_the_process_is_nobodys_fault(sleeper, monkeypatch):
    for name in ("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"):
        monkeypatch.delenv(name, raising=False)
    before = leftovers.picture(CPU, groups=0)
    sleeper("tqdm_monitor")
    monkeypatch.setenv("TRITON_CACHE_DIR", os.curdir)
    monkeypatch.setenv("TRITON_PTXAS_PATH", os.curdir)
    assert left_behind(before) == []
    sleeper("monitor")
    monkeypatch.setenv("TRITON_HOME", os.curdir)
    assert left_behind(before) == ["environment variables changed: TRITON_HOME", "threads: monitor"]
