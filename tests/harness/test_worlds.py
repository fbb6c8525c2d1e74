"""Worlds: which cases share one, and what their ranks run with."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from shardproof.harness import world
from shardproof.harness.parity import Rank


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
