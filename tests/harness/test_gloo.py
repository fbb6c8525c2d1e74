"""Gloo groups have one worker thread, for with two torch corrupts memory (F-270), and do not interrupt (F-271)."""

import datetime
import importlib.util
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardproof.harness.parity.rank import Rank
from shardproof.harness.worlds import gloo
from shardproof.testing import world
from shardproof.testing.other_worlds import other_worlds

pytestmark = pytest.mark.sampled


def options(group: dist.ProcessGroup | None) -> dist.ProcessGroupGloo._Options:
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    return getattr(backend, "wrapped_pg", backend).options


@world(1)
def test_many_collectives_in_flight(rank: Rank):
    """With two threads this kills the process within two seconds."""
    name = dist.new_group(backend="gloo").group_name
    gather, wait = torch.ops._c10d_functional.all_gather_into_tensor, torch.ops._c10d_functional.wait_tensor
    for _ in range(1000):
        for gathered in [gather(torch.ones(3), 1, name) for _ in range(64)]:
            wait(gathered)


@world(2)
def test_groups_whoever_makes_them(rank: Rank):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    groups = [dist.new_group(backend="gloo"), mesh["dp"].get_group(), mesh["tp"].get_group()]
    groups += [dist.group.WORLD] * (rank.device.type == "cpu")
    assert [options(group)._threads for group in groups] == [1] * len(groups)
    with other_worlds(rank) as worlds, worlds.of(1):
        assert options(dist.group.WORLD)._threads == 1


@world(2, debug_level="DETAIL")
def test_groups_whose_collectives_torch_compares(rank: Rank):
    """At the level DETAIL torch wraps the backend."""
    assert options(dist.new_group(backend="gloo"))._threads == 1


@world(2)
def test_timeouts_are_kept(rank: Rank):
    timeout = datetime.timedelta(seconds=41)
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert options(group)._timeout == timeout
    # torch checks the backend's class; the backend's Python object may be a new one.
    distributed_c10d._set_pg_timeout(2 * timeout, group)
    assert options(group)._timeout == 2 * timeout


@world(2)
def test_interfaces_that_the_environment_names(rank: Rank):
    rank.monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    group = dist.new_group(backend="gloo")
    assert len(options(group)._devices) == 2
    total = torch.ones(3)
    for _ in range(3):
        dist.all_reduce(total, group=group)
    assert total.tolist() == [8.0] * 3


def check_sum(group: dist.ProcessGroup) -> None:
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [2.0] * 3


def policies() -> dict[int, int]:
    """The scheduler's policy of each thread of this process."""
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    return {thread: os.sched_getscheduler(thread) for thread in threads}


HAS_BATCH = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no SCHED_BATCH")


@HAS_BATCH
@world(2)
def test_threads_that_do_not_interrupt(rank: Rank):
    own = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    try:
        before = policies()
        group = dist.new_group(backend="gloo")
        after = policies()
    finally:
        os.sched_setscheduler(0, own, os.sched_param(0))
    started = [after[thread] for thread in after.keys() - before.keys()]
    assert len(started) >= 2, "a thread that polls and one that works"
    assert set(started) == {os.SCHED_BATCH}
    assert {thread: after[thread] for thread in before} == before, "threads that were there before keep theirs"
    dist.barrier(group)


@HAS_BATCH
@world(2)
def test_a_system_that_lets_nobody_choose(rank: Rank):
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    rank.monkeypatch.setattr(os, "sched_setscheduler", refuse)
    check_sum(dist.new_group(backend="gloo"))


@HAS_BATCH
@world(2)
def test_a_policy_that_somebody_has_chosen(rank: Rank):
    chosen: list[object] = []
    rank.monkeypatch.setattr(os, "sched_getscheduler", lambda thread: os.SCHED_FIFO)
    rank.monkeypatch.setattr(os, "sched_setscheduler", lambda *arguments: chosen.append(arguments))
    check_sum(dist.new_group(backend="gloo"))
    assert not chosen


@world(2)
def test_a_system_without_the_policy(rank: Rank):
    rank.monkeypatch.delattr(os, "SCHED_BATCH", raising=False)
    check_sum(dist.new_group(backend="gloo"))


# Another torch


class Options:
    def __init__(self):
        self._timeout, self._threads, self._devices, self.enable_reconfigure = None, 2, [], False


class OptionsWithoutThreads:
    def __init__(self):
        self._timeout, self._devices = None, []


class FakeGloo:
    """Stands for torch's class; keeps what it is made from."""

    _Options = Options
    create_default_device = staticmethod(object)

    def __init__(self, store, rank, size, options=None, *, timeout=None, enable_reconfigure=False, colour=None):
        self.options = options
        self.own = {"timeout": timeout, "enable_reconfigure": enable_reconfigure, "colour": colour}


def mended(monkeypatch, torchs):
    """The class of mended groups, as it is made where torch has another class for them."""
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", torchs)
    spec = importlib.util.spec_from_file_location("gloo_of_another_torch", gloo.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._Mended


def test_one_more_keyword_that_is_an_option(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = mended(monkeypatch, FakeGloo)(None, 0, 1, timeout=7, enable_reconfigure=True)
    found = group.options
    assert (found._timeout, found._threads, len(found._devices), found.enable_reconfigure) == (7, 1, 1, True)


def test_one_more_keyword_that_is_no_option(monkeypatch):
    make = mended(monkeypatch, FakeGloo)
    with pytest.warns(UserWarning, match="torch's own.*colour") as warned:
        groups = [make(None, 0, 1, timeout=7, colour="red") for _ in range(2)]
    assert len(warned) == 1, "once"
    assert [group.own for group in groups] == [{"timeout": 7, "enable_reconfigure": False, "colour": "red"}] * 2
    assert groups[0].options is None


def test_options_that_lack_one(monkeypatch):
    make = mended(monkeypatch, type("Gloo", (FakeGloo,), {"_Options": OptionsWithoutThreads}))
    with pytest.warns(UserWarning, match="torch's own.*_threads"):
        group = make(None, 0, 1, timeout=7)
    assert group.options is None and group.own["timeout"] == 7
