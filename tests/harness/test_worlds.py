"""Worlds: which cases share one, and what their ranks run with."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist

from shardproof.harness.parity.rank import Rank
from shardproof.harness.worlds import pool
from shardproof.harness.worlds.jobs import Job, Result, WorldKey
from shardproof.testing import world


@world(2, debug_level="DETAIL")
def test_debug_level_makes_a_world_of_its_own(rank: Rank):
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL


@world(2)
def test_other_worlds_are_quiet(rank: Rank):
    assert dist.get_debug_level() == dist.DebugLevel.OFF


@world(2)
def test_ranks_talk_over_the_loopback_and_compute_on_one_thread(rank: Rank):
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert torch.get_num_threads() == 1
    assert os.stat(rank.tmp_path).st_mode & 0o077 == 0


@world(1)
def test_worlds_on_the_cpu_see_no_other_device(rank: Rank):
    if rank.device.type == "cpu":
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert not torch.cuda.is_available()


@world(1, 2)
def test_meshes_are_made_once(rank: Rank):
    assert rank.mesh() is rank.mesh()
    assert rank.mesh().size() == rank.world_size


class Counted:
    """Stands for a world; every implementation keeps something in it."""

    started, alive, most = 0, 0, 0
    is_alive, reserved_for = True, ""

    def __init__(self, key, devices):
        self.size = key.size
        Counted.started += 1
        Counted.alive += key.size
        Counted.most = max(Counted.most, Counted.alive)

    def run(self, job):
        result = Result(job.number, 0, "pass", kept=["modules: Linear"])
        return pool.Outcome([result], [], 0.0)

    def is_in_step(self, results):
        return True

    def stop(self):
        Counted.alive -= self.size


@pytest.mark.parametrize(
    ("sizes", "implementations", "started", "ranks"), [((1, 2, 4), "ab", 6, 14), ((8,), "abcdef", 12, 32)]
)
def test_worlds_that_are_used_in_turn_are_kept_within_bounds(monkeypatch, sizes, implementations, started, ranks):
    monkeypatch.setattr(pool, "World", Counted)
    monkeypatch.setattr(Counted, "started", 0)
    monkeypatch.setattr(Counted, "alive", 0)
    monkeypatch.setattr(Counted, "most", 0)
    worlds = pool.Pool()
    for size, name in list(itertools.product(sizes, implementations)) * 2:
        worlds.run(WorldKey(size, "cpu"), Job(1, "m", "p", "f", name, b"", 0, 0, "", 1.0))
    worlds.close()
    assert (Counted.started, Counted.most) == (started, ranks)
    assert Counted.alive == 0
