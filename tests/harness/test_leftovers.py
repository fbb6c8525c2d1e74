"""What does not count as left behind; test_chaos.py has what does."""

import _thread
import os
import threading

import pytest
import torch
from torch import nn

from shardproof.harness.worlds import leftovers
from tests.harness.inner import python

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


@pytest.fixture
def left_behind(tmp_path, monkeypatch):
    """What differs from the test's beginning, for a world whose directory is ``tmp_path``."""

    def look():
        monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)  # which tells setup from call
        return leftovers.picture(CPU, groups=0, directory=str(tmp_path))

    before = look()
    return lambda: list(leftovers.differences(before, look()).values())


def test_files_in_the_worlds_own_directory_are_the_harnesss(left_behind, tmp_path):
    with open(tmp_path / "rendezvous", "w"):
        assert left_behind() == []
    with open(f"{tmp_path}-other", "w"):
        assert left_behind() == [f"open files: {tmp_path}-other"]


def test_threads_of_one_name_count_one_by_one(sleeper, tmp_path):
    """One of them was there before: the second is left behind."""

    def threads():
        return leftovers.picture(CPU, groups=0, directory=str(tmp_path))

    sleeper("loader")
    before = threads()
    sleeper("loader")
    found = [line for line in leftovers.differences(before, threads()).values() if "loader" in line]
    assert len(found) == 1 and found[0].count("loader") == 1, found


def test_modules_count_one_by_one(left_behind):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert left_behind() == ["modules: 2 x Linear, Sequential; often a hook or closure keeps them"]
    model.append(model)  # a cycle
    del model
    assert left_behind() == []


def test_what_torch_compile_keeps_for_the_process_is_nobodys_fault(left_behind, sleeper, monkeypatch):
    sleeper("tqdm_monitor")
    monkeypatch.setenv("TRITON_LIBDEVICE_PATH", os.curdir)
    monkeypatch.setenv("TRITON_PTXAS_PATH", os.curdir)
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "1")
    assert left_behind() == []
    sleeper("monitor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.curdir)
    assert left_behind() == ["environment variables changed: TORCHINDUCTOR_CACHE_DIR", "threads: monitor"]


def test_threads_that_python_did_not_start_are_not_compared(left_behind):
    seen, done, ended = threading.Event(), threading.Event(), threading.Event()

    def as_one_of_autograds():
        assert threading.current_thread().name.startswith("Dummy-")  # asking for it gives it the name
        seen.set()
        done.wait()
        ended.set()

    _thread.start_new_thread(as_one_of_autograds, ())
    assert seen.wait(10)
    assert left_behind() == []
    done.set()
    assert ended.wait(10)


def test_what_torch_rebinds_by_itself_is_no_patch():
    """In a process of its own: the first optimizer and the first compiled function change torch for good."""
    code = """
import torch, sys
from shardproof.harness.worlds import leftovers
patches = leftovers.Patches()
model = torch.nn.Linear(2, 2)
init = torch.nn.Module.__init__
torch.compile(model, backend="eager")(torch.ones(1, 2))
assert torch.nn.Module.__init__ is not init, "torch.compile no longer does what this test is about"
torch.optim.Adam(model.parameters()).step()
torch.set_default_dtype(torch.float64)
torch.new_name = print
assert patches.found() == [], patches.found()
torch.new_name = sum
torch.nn.Module.__init__ = lambda self: None
assert patches.found() == ["torch.new_name", "torch.nn.modules.module.Module.__init__"], patches.found()
"""
    python("-c", code, code=0)
