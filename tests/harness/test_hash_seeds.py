"""Worlds whose ranks have hash seeds of their own: which they are. That they end as others do, test_chaos.py has."""

import dataclasses
import os
import pathlib

import pytest

from shardproof.harness.parity.rank import Rank
from shardproof.harness.worlds.jobs import WorldKey
from shardproof.harness.worlds.world import World, WorldDied
from shardproof.testing import world
from tests.harness.inner import CASE, PYTHONPATH, QUIET, python

pytestmark = pytest.mark.nightly

NAMES = ("exp_avg", "exp_avg_sq", "step", "weight", "bias", "gain", "offset")


def hash_with(seed: str) -> int:
    """The hash of a string in an interpreter with this seed."""
    return int(python("-S", "-c", "print(hash('name'))", PYTHONHASHSEED=seed, code=0).stdout)


@world(2, 4, own_hash_seeds=True)
def test_each_rank_has_the_seed_of_its_index(rank: Rank):
    assert hash("name") == hash_with(str(rank.index + 1))
    assert len({tuple(order) for order in rank.exchange([*{*NAMES}])}) == rank.world_size
    assert os.getsid(0) == os.getpid()


@world(2)
def test_ranks_of_other_worlds_have_one_seed(rank: Rank):
    assert len(set(rank.exchange(hash("name")))) == 1


def test_an_interpreter_that_ignores_its_environment_has_such_ranks(tmp_path):
    body = f"assert hash('name') == {[hash_with('1'), hash_with('2')]}[rank.index]"
    source = CASE.format(body=body).replace("(2)", "(2, own_hash_seeds=True)")
    tmp_path.joinpath("test_inner.py").write_text(source)
    start = f"import sys; sys.path[:0] = {PYTHONPATH.split(os.pathsep)}; import pytest; sys.exit(pytest.main())"
    python("-E", "-c", start, *QUIET, "--impl", "ddp", "--device", "cpu", "test_inner.py", cwd=tmp_path, code=0)


def test_a_rank_that_gets_no_interpreter_says_why(monkeypatch):
    spec_of = World._spec
    monkeypatch.setattr(World, "_spec", lambda self, index: dataclasses.replace(spec_of(self, index), hash_seed=-1))
    with pytest.raises(WorldDied, match=r"(?s)did not start: rank 0: it closed its connection.*PYTHONHASHSEED must be"):
        World(WorldKey(1, "cpu", own_hash_seeds=True), [0])


def test_a_rank_leaves_no_file_of_its_start():
    started = World(WorldKey(2, "cpu", own_hash_seeds=True), [0, 0])
    try:
        assert not [*pathlib.Path(started._directory).glob("*.start")]
    finally:
        started.stop()
