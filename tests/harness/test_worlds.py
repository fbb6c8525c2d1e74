"""Worlds: which cases share one, what their ranks run with, and worlds of another size in the ranks of a case."""

import itertools
import os
import sys

import pytest
import torch
import torch.distributed as dist

from shardproof.harness.collectives.announce import Announcer
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.rank_state import process_groups
from shardproof.harness.worlds import forkserver, pool
from shardproof.harness.worlds.jobs import Job, Result, WorldKey
from shardproof.testing import world
from shardproof.testing.other_worlds import other_worlds


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
    for name in ("started", "alive", "most"):
        monkeypatch.setattr(Counted, name, 0)
    worlds = pool.Pool()
    for size, name in list(itertools.product(sizes, implementations)) * 2:
        worlds.run(WorldKey(size, "cpu"), Job(1, "m", "p", "f", name, b"", 0, 0, "", 1.0))
    worlds.close()
    assert (Counted.started, Counted.most) == (started, ranks)
    assert Counted.alive == 0


# Worlds of another size in the ranks of a case


@world(4)
def test_ranks_are_divided_in_their_order(rank: Rank):
    own = process_groups()
    with other_worlds(rank) as worlds:
        assert not dist.is_initialized()
        for size in (2, 4, 1):
            with worlds.of(size) as member:
                assert (member.world_size, member.index) == (size, rank.index % size)
                assert (dist.get_world_size(), dist.get_rank()) == (size, member.index)
                first = rank.index - member.index
                assert member.exchange(rank.index) == list(range(first, first + size))
                total = torch.full((1,), float(rank.index), device=rank.device)
                dist.all_reduce(total, group=member.mesh().get_group())
                assert float(total) == sum(range(first, first + size))
            assert not dist.is_initialized()
    assert process_groups() == own
    total = torch.ones(1, device=rank.device)
    dist.all_reduce(total)
    assert float(total) == 4


@world(4)
def test_ranks_that_do_not_divide_are_refused(rank: Rank):
    message = "4 ranks do not divide into worlds of 3"
    with other_worlds(rank) as worlds, pytest.raises(ValueError, match=message), worlds.of(3):
        pass


@world(4)
def test_collectives_are_announced_as_those_of_the_ranks_of_the_case(rank: Rank):
    announced, traces = [], []
    rank.monkeypatch.setattr(Announcer, "_meet", lambda self, entry: announced.append(entry))
    rank.monkeypatch.setattr(rank.record, "add_trace", traces.append)
    rank.announcer.start_job(rank.announcer.job, checking=True, patience=1.0)
    first = rank.index - rank.index % 2
    with other_worlds(rank) as worlds:
        for _ in range(2):
            with worlds.of(2) as member:
                run = member.run(torch.nn.Linear(4, 4))
                run.forward_backward((member.batch(0, (2, 4)),), loss=torch.sum)
    assert {entry.ranks for entry in announced} == {(first, first + 1)}
    # The groups of both worlds have the same names, and are told apart.
    assert len({entry.group.partition("/")[0] for entry in announced}) == 2
    assert len(traces) == 2
    assert all(f"ranks {first}-{first + 1}" in line for trace in traces for line in trace)


@world(2)
def test_a_pair_of_another_world_must_be_checked(rank: Rank):
    message = "step 0 of a pair was trained and never compared"
    with other_worlds(rank) as worlds, pytest.raises(AssertionError, match=message), worlds.of(1) as member:
        member.pair(torch.nn.Linear(4, 4)).step(member.batch(0, (2, 4)))


def test_ranks_look_for_torch_where_the_controller_does(monkeypatch):
    """Not first where shardproof is installed: another torch may lie beside it."""
    monkeypatch.setattr(sys, "path", ["/a/torch/of/mine", *sys.path])
    with forkserver._environment():
        found = os.environ["PYTHONPATH"].split(os.pathsep)
    assert found == ["/a/torch/of/mine", *dict.fromkeys(filter(None, sys.path[1:]))]
