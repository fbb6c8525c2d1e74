"""The baseline and the oracle are computed once for all cases that have the same, and never taken where they differ."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.harness.adapters.base import Clip
from shardproof.harness.models import optim
from shardproof.harness.parity.pair import Pair
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.rank_state import _MOST_BYTES, _RECOMPUTED, Packed, ReplayCache, is_equal
from shardproof.harness.parity.replay import digest
from shardproof.harness.watching.capture import as_inputs
from shardproof.testing import models, world


def model() -> nn.Module:
    torch.manual_seed(3)
    return models.Tower(dim=9)


def fresh(rank: Rank) -> None:
    """Let the case begin with an empty cache, and leave none of its results to others."""
    rank.monkeypatch.setattr(rank, "replays", ReplayCache())


def half(output: Any) -> torch.Tensor:
    """A loss of half the size."""
    return models.mean_square(output) / 2


def train(rank: Rank, pair: Pair, *, seed: int = 0, steps: int = 2, loss: Any = models.mean_square) -> int:
    """Train and check; return how many results were computed."""
    before = rank.replays.version
    for step in range(steps):
        pair.step(rank.batch(100 * seed + step, (2, 9)), loss=loss)
        pair.check()
    return rank.replays.version - before


@world(2)
def test_another_way_to_shard_takes_the_results_of_the_first(rank: Rank) -> None:
    fresh(rank)
    assert train(rank, rank.pair(model())) == 2
    second = rank.pair(model(), units=model().units(), reshard_after_forward=True)
    assert train(rank, second) == 0
    assert second.runs == (second.sharded,), "a baseline was made for nothing"
    assert train(rank, second, seed=1, steps=1) == 1, "the third step is new"
    assert len(second.runs) == 2
    second.evaluate(rank.batch(7, (2, 9)))
    second.check()


@world(2)
@pytest.mark.parametrize(
    "other", [{"optimizer": optim.sgd(lr=0.01)}, {"clip": Clip(max_norm=0.1)}, {"baseline": "replicated"}]
)
def test_another_configuration_has_its_own(rank: Rank, other: dict[str, Any]) -> None:
    fresh(rank)
    train(rank, rank.pair(model()))
    assert train(rank, rank.pair(model(), **other)) == 2


@world(2)
def test_another_batch_loss_or_start_has_its_own(rank: Rank) -> None:
    fresh(rank)
    train(rank, rank.pair(model()))
    assert train(rank, rank.pair(model()), seed=1) == 2
    assert train(rank, rank.pair(model()), loss=half) == 2
    started = model()
    with torch.no_grad():
        next(started.parameters()).add_(1e-6)
    assert train(rank, rank.pair(started)) == 2
    # On one rank alone: no rank may then take a result.
    mine = rank.pair(model())
    before = rank.replays.version
    for step in range(2):
        mine.step(rank.batch(step if rank.index == 0 else 50 + step, (2, 9)))
        mine.check()
    assert rank.replays.version - before == 2


@world(2)
def test_what_has_state_of_its_own_is_computed_every_time(rank: Rank) -> None:
    fresh(rank)
    calls = []

    def counting(output: Any) -> torch.Tensor:
        calls.append(output)
        return models.mean_square(output)

    for _ in range(2):
        assert train(rank, rank.pair(model()), loss=counting) == 0
    assert len(calls) == 2 * 2 * (1 + 1 + rank.world_size)  # pairs, steps; sharded, baseline, the oracle's ranks


@world(2)
def test_a_look_at_outputs_before_the_loss(rank: Rank) -> None:
    """It is called for the sharded run alone, at each microbatch, and the results are kept all the same."""
    fresh(rank)
    seen: list[bool] = []
    for times in (1, 2):
        pair = rank.pair(model(), microbatches=2)
        batches = [rank.batch(0, (2, 9), microbatch=number) for number in range(2)]
        pair.step(batches, loss=half, before_loss=lambda output: seen.append(output.grad_fn is not None))
        pair.check()
        assert seen == [True, True] * times, f"called {len(seen)} times after {times} pairs"
        assert rank.replays.version == 1, f"{rank.replays.version} results after {times} pairs"


@world(2)
def test_a_baseline_that_a_case_looks_at_is_its_own(rank: Rank) -> None:
    fresh(rank)
    train(rank, rank.pair(model()))
    pair = rank.pair(model())
    with torch.no_grad():
        for value in (*pair.baseline.adapter.module.parameters(), *pair.oracle.model.parameters()):
            value.mul_(1)
    assert train(rank, pair) == 0


@world(2)
def test_random_results_are_not_kept(rank: Rank) -> None:
    """Only the outputs of the baseline are looked at: a random model has no oracle."""
    fresh(rank)
    replay = rank.pair(nn.Sequential(nn.Linear(9, 9), nn.Dropout(0.5)))._replay
    before = rank.replays.version
    replay.step([as_inputs(rank.batch(0, (2, 9)))], options={"loss": models.mean_square}, ahead=0)
    assert rank.replays.version == before


@world(2)
def test_a_result_in_so_many_is_computed_again(rank: Rank) -> None:
    fresh(rank)
    train(rank, rank.pair(model()), steps=1)
    rank.replays._found = _RECOMPUTED - 1
    pair = rank.pair(model())
    assert train(rank, pair, steps=1) == 0
    assert len(pair.runs) == 2, "the result was taken"
    for packed in rank.replays._results.values():
        packed._data = bytes(len(packed._data))
    rank.replays._found = _RECOMPUTED - 1
    pair = rank.pair(model())
    pair.step(rank.batch(0, (2, 9)))
    with pytest.raises(RuntimeError, match="computed again, differ"):
        pair.check()


@world(2)
def test_ranks_that_may_have_different_results_drop_them(rank: Rank) -> None:
    fresh(rank)
    train(rank, rank.pair(model()))
    if rank.index == 1:
        rank.replays.clear(version=rank.replays.version - 1)
    assert train(rank, rank.pair(model())) >= 2
    assert len(set(rank.exchange(rank.replays.version))) == 1


def test_a_packed_result_is_a_copy_each_time():
    value = {"a": [torch.arange(3), None], "b": (torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor(4.0), "text")}
    packed = Packed(copy.deepcopy(value))
    first = packed.unpack()
    assert is_equal(first, value)
    assert first["b"][2] == "text"
    first["a"][0].zero_()
    assert is_equal(packed.unpack(), value)
    assert not is_equal(first, value)


def test_the_least_recently_used_results_are_dropped():
    cache = ReplayCache()
    large = torch.zeros(_MOST_BYTES // 4 // 3 - 16)
    for key in (b"1", b"2", b"3"):
        cache.put(key, large)
    assert cache.get(b"1") is not None
    cache.put(b"4", large)
    assert [cache.get(key) is not None for key in (b"1", b"2", b"3", b"4")] == [True, False, True, True]
    assert cache.version == 4


def test_digests_differ_where_results_may():
    start = model()
    tied = model()
    tied.layers = nn.ModuleList([tied.layers[0], tied.layers[0]]) if hasattr(tied, "layers") else tied.layers
    frozen = model()
    next(frozen.parameters()).requires_grad_(False)
    hooked = model()
    hooked.register_forward_hook(lambda module, arguments, output: 2 * output)
    evaluated = model().eval()
    kinds = [start, tied, frozen, hooked, evaluated, half, models.mean_square, torch.ones(2), torch.ones(2, 1)]
    kinds += [torch.ones(2, dtype=torch.int64), optim.sgd(), optim.sgd(lr=1.0), None, (None,)]
    digests = [digest(kind) for kind in kinds]
    assert None not in digests
    assert len(set(digests)) == len(digests)
    assert digest(copy.deepcopy(start)) == digests[0]


def test_what_has_state_of_its_own_has_no_digest():
    seen: list[Any] = []

    class Counter:
        def __call__(self, output: Any) -> Any:
            return output

    hooked = model()
    hooked.register_forward_hook(lambda module, arguments, output: seen.append(output))
    assert [digest(one) for one in (hooked, Counter(), Counter().__call__, lambda output: seen)] == [None] * 4
