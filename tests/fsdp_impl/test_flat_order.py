"""With the debug level DETAIL, ranks that run their units in another order are told apart."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import FULL, NONE, ZERO2, wrap
from tests.fsdp_impl.replicas import ALL_REDUCE, GATHER, REDUCE, batch, counts


class Paths(nn.Module):
    """Two ways of equal numbers of elements, of which one runs: collectives match, numbers do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.a = nn.Linear(6, 6, bias=False)
        self.b = nn.Sequential(nn.Linear(6, 3, bias=False), nn.Tanh(), nn.Linear(3, 6, bias=False))
        self.path = "a"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for name in self.path:
            x = torch.tanh(getattr(self, name)(x))
        return x


@contextmanager
def checked() -> Iterator[None]:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(before)


def sharded(rank: Rank, strategy: Any, **options: Any) -> Any:
    model = Paths()
    for name in ("a", "b"):
        setattr(model, name, wrap(getattr(model, name), sharding_strategy=strategy, device_id=rank.device, **options))
    with checked():
        return wrap(model, sharding_strategy=strategy, device_id=rank.device, **options)


def train(rank: Rank, model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batch(rank, 0, (8, 5))).sum().backward()
    return [str(warning.message) for warning in caught if "Forward order" in str(warning.message)]


@world(2, 4)
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    "path, doing",
    [("b", "is all-gathering parameters for [['b.0.weight', 'b.2.weight']]"), ("", "is not all-gathering any more")],
)
def test_the_first_forward_raises_on_every_rank(
    rank: Rank, path: str, doing: str, strategy: Any, use_orig_params: bool
) -> None:
    model = sharded(rank, strategy, use_orig_params=use_orig_params)
    if rank.index == rank.world_size - 1:
        model.module.path = path
    with pytest.raises(RuntimeError) as caught:
        model(batch(rank, 0, (8, 5)))
    assert str(caught.value) == (
        "Forward order differs across ranks: rank 0 is all-gathering parameters for [['a.weight']] while "
        f"rank {rank.world_size - 1} {doing}"
    )
    # Repaired, it is the first again.
    model.module.path = "a"
    assert train(rank, model) == []


@world(2)
@pytest.mark.parametrize("strategy", [FULL, ZERO2])
@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize(
    "path, found",
    [
        ("b", "all-gather for [['a.weight']] but trying to all-gather parameters for [['b.0.weight', 'b.2.weight']]"),
        (
            "ab",
            "not all-gather any more parameters in the forward but trying to all-gather parameters for "
            "[['b.0.weight', 'b.2.weight']]",
        ),
        ("", "all-gather for [['a.weight']] but ending the forward"),
    ],
)
def test_a_later_forward_warns_once(rank: Rank, strategy: Any, before: int, path: str, found: str) -> None:
    model = sharded(rank, strategy)
    for _ in range(before):
        assert train(rank, model) == []
    model.module.path = path
    assert train(rank, model) == [
        f"Forward order differs from that of the first iteration on rank {rank.index}. "
        "Collectives are unchecked and may give incorrect results or hang\n"
        f"Expected to {found}"
    ]
    assert train(rank, model) == []


@world(2)
@pytest.mark.parametrize("strategy", [FULL, ZERO2])
def test_evaluation_is_not_checked(rank: Rank, strategy: Any) -> None:
    model = sharded(rank, strategy)
    for _ in range(2):
        model.train()
        model.module.path = "a"
        assert train(rank, model) == []
        model.eval()
        for path in ("a", "ba"):
            model.module.path = path
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                model(batch(rank, 0, (8, 5)))


@world(2)
def test_one_small_reduction_for_each_unit_in_the_first_forward_alone(rank: Rank) -> None:
    model = sharded(rank, FULL)
    found = [counts(lambda: train(rank, model)) for _ in range(2)]
    assert found == [
        {GATHER: 3, REDUCE: 2, ALL_REDUCE: 2 + 1},  # and one at the end: no rank goes on
        {GATHER: 3, REDUCE: 2},
    ]


@world(2)
def test_without_the_debug_level_nothing_is_checked(rank: Rank) -> None:
    model = Paths()
    model.a, model.b = (wrap(layer, device_id=rank.device) for layer in (model.a, model.b))
    model = wrap(model, device_id=rank.device)
    assert counts(lambda: train(rank, model)) == {GATHER: 3, REDUCE: 2}
