"""``validate_order``: ranks that run their units in another order are told apart."""

import warnings

import pytest
import torch
from torch import nn

from fsdp_impl import fully_shard, validate_order
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import batch, counts


class Paths(nn.Module):
    """Two layers of equal size, of which one runs: collectives match, numbers do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = (nn.Linear(4, 4) for _ in range(3))
        self.path = "a"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for name in self.path:
            x = getattr(self, name)(x)
        return x


def sharded(rank: Rank) -> Paths:
    model = Paths().to(rank.device)
    for layer in (model.first, model.a, model.b):
        fully_shard(layer, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    validate_order(model)
    return model


def train(rank: Rank, model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batch(rank, 0, (2, 4))).sum().backward()
    return [str(warning.message) for warning in caught if "Forward order" in str(warning.message)]


@world(2)
@pytest.mark.parametrize(
    "path, doing", [("b", r"all-gathering parameters for \[\['b.weight', 'b.bias'\]\]"), ("", "not .*")]
)
def test_the_first_forward_raises_on_every_rank(rank: Rank, path: str, doing: str) -> None:
    model = sharded(rank)
    if rank.index == 1:
        model.path = path
    text = (
        rf"^Forward order differs across ranks: rank 0 is .* for \[\['a.weight', 'a.bias'\]\] while rank 1 is {doing}"
    )
    with pytest.raises(RuntimeError, match=text):
        model(batch(rank, 0, (2, 4)))


@world(2)
@pytest.mark.parametrize(
    "path, found",
    [
        (
            "b",
            "all-gather for [['a.weight', 'a.bias']] but trying to all-gather parameters for [['b.weight', 'b.bias']]",
        ),
        ("ab", "not all-gather any more parameters in the forward but trying to all-gather parameters for [['b.weight"),
        ("", "all-gather for [['a.weight', 'a.bias']] but ending the forward"),
    ],
)
@pytest.mark.parametrize("before", [1, 3])
def test_a_later_forward_warns_once(rank: Rank, path: str, found: str, before: int) -> None:
    model = sharded(rank)
    for _ in range(before):
        assert train(rank, model) == []
    model.path = path
    (text,) = train(rank, model)
    assert text.startswith(
        f"Forward order differs from that of the first iteration on rank {rank.index}. "
        "Collectives are unchecked and may give incorrect results or hang\n"
    )
    assert found in text
    assert train(rank, model) == []


@world(2)
def test_evaluation_is_not_checked(rank: Rank) -> None:
    model = sharded(rank)
    for _ in range(2):
        model.train()
        model.path = "a"
        assert train(rank, model) == []
        model.eval()
        model.path = "ba"
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            model(batch(rank, 0, (2, 4)))


@world(2)
def test_only_the_first_forward_costs(rank: Rank) -> None:
    model = sharded(rank)
    train(rank, model)
    with_check = counts(lambda: train(rank, model))
    model._unit().iteration.order = None  # type: ignore[attr-defined]
    assert counts(lambda: train(rank, model)) == with_check


@world(1)
def test_a_model_without_units_is_refused(rank: Rank) -> None:
    with pytest.raises(ValueError, match=r"Expects a model with FSDPModules but got .*Linear"):
        validate_order(nn.Linear(2, 2))
