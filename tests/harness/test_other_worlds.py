"""Worlds of another size in the ranks of a case: whose ranks they are, what is announced, and what is left of them."""

import pytest
import torch
import torch.distributed as dist

from shardproof.harness.casework.other_worlds import other_worlds
from shardproof.harness.collectives.announce import Announcer
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.rank_state import process_groups
from shardproof.testing import world


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
