"""Bugs that large worlds alone show are caught in simulated ones, each by a case and with the words that it should."""

from __future__ import annotations

import pytest

from tests.harness import planted_simulation as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of_killers

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which each planted bug has ranks of its own")

#: Twice the least that all meshes of the cases divide.
SIZE = 128
COUNTED = "test_gathers_and_reductions and precision0-None"
KILLED = {
    "gathered-twice-by-many": Killer(COUNTED, "forward gathers: the bytes of the collectives are ["),
    "gathered-out-of-turn": Killer(COUNTED, "backward gathers: the bytes of the collectives are ["),
    "many-reduced-in-double": Killer(COUNTED, "no reduction of the root's own unit"),
    "one-row-more": Killer("test_bytes_of_a_step", "suffice"),
    "floor-of-rows": Killer("test_layouts", "rank 0 holds"),
    "one-rank-misses-a-row": Killer("test_layouts", "rank 64 holds"),
    "shards-of-the-first-dimension": Killer(
        "test_tensor_parallel and 3d", "all_gather in forward is along replicate, not shard"
    ),
    "replicas-of-the-last-dimension": Killer(
        "test_replicas and s128-None", "all_reduce in backward is along shard, not replicate"
    ),
    "neighbours-far-apart": Killer("test_resharded_to_eight", "all_gather in backward is along"),
    "many-kept-after-forward": Killer("test_units_held_at_a_time", "forward of 8 units holds"),
    "many-kept-after-backward": Killer("test_held_between_steps", "bytes of gathered"),
    "all-reduced-kept-until-the-end": Killer(
        "test_units_held_beside_replicas and bfloat16", "backward of 8 units holds"
    ),
}


cases = cases_of_killers(KILLED, planted.ADAPTERS, flat=(), options=("--simulate", str(SIZE)))


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_reference_passes_the_same_cases(cases):
    assert_sound_passes(cases)


#: The others run by night: each has ranks of its own, which cost a second of a core and more.
BY_DAY = ("shards-of-the-first-dimension",)


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[] if bug in BY_DAY else [pytest.mark.nightly]) for bug in KILLED]
)
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
