"""Values that were gathered before a change of their shards are not used, and looking for changes costs little."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_impl import FullyShardedDataParallel, fully_shard
from fsdp_impl.common import collectives
from fsdp_impl.per_parameter.shards import Shards
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world


class Raised(Exception):
    pass


class Chain(nn.Module):
    """Linear layers, of which the forward raises before the last one while ``raises`` is set."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *first, last = self.layers
        for layer in first:
            x = layer(x)
        if self.raises:
            raise Raised
        out: torch.Tensor = last(x)
        return out


def ones(rank: Rank) -> torch.Tensor:
    return torch.ones(1, 4, device=rank.device)


def sharded(rank: Rank, *sizes: tuple[int, int]) -> Any:
    model: Any = Chain(*sizes)
    for layer in model.layers:
        fully_shard(layer, mesh=rank.mesh(), reshard_after_forward=False)
    return fully_shard(model, mesh=rank.mesh())


def new_data(param: Any) -> None:
    """Give ``param`` other memory, with threes: no version counts that."""
    local = getattr(param, "_local_tensor", param)
    local.data = torch.full_like(local, 3.0)


@world(2)
@pytest.mark.parametrize("flat", [False, True])
def test_new_data_after_a_forward_that_raised(rank: Rank, flat: bool) -> None:
    """The next forward uses it, though the one that raised had gathered, and no recovery call came in between."""
    if flat:
        inner = Chain((4, 4), (4, 4))
        inner.layers[0] = FullyShardedDataParallel(inner.layers[0], use_orig_params=True, device_id=rank.device)
        model: Any = FullyShardedDataParallel(inner, use_orig_params=True, device_id=rank.device)
    else:
        model = inner = sharded(rank, (4, 4), (4, 4))
    inner.raises = True
    with pytest.raises(Raised):
        model(ones(rank))
    for param in params_of(model, flat):
        new_data(param)
    inner.raises = False
    assert model(ones(rank)).tolist() == [[144.0] * 4]


def params_of(model: Any, flat: bool) -> Iterator[Any]:
    """The sharded parameters, which user code has from an optimizer also while the modules hold others."""
    if flat:
        yield from model.parameters()
        return
    for unit in [model._unit(), *(layer._unit() for layer in model.layers)]:
        yield from (param.sharded for param in (unit.group.shards.params if unit.group else ()))


# Unshards by hand, of which each decides for all units


@world(1)
def test_unshards_by_hand_look_at_all_units_once(rank: Rank) -> None:
    """Twice as many units are twice as many looks, not four times."""
    looks: list[Shards] = []
    versions = Shards.versions

    def counted(shards: Shards) -> list[int]:
        looks.append(shards)
        return versions(shards)

    for number in (3, 6):
        model = sharded(rank, *[(4, 4)] * number)
        with torch.no_grad():
            model(ones(rank))
        for layer in model.layers:
            layer.reshard()
        with rank.monkeypatch.context() as patch:
            patch.setattr(Shards, "versions", counted)
            looks.clear()
            for layer in model.layers:
                layer.unshard()
        assert len(looks) == number


def gathers(rank: Rank, patch: pytest.MonkeyPatch) -> list[str]:
    """The units that are gathered from now on."""
    found: list[str] = []
    gather = collectives.gather

    def noted(*args: Any, unit: str, **kwargs: Any) -> Any:
        found.append(unit)
        return gather(*args, unit=unit, **kwargs)

    patch.setattr(collectives, "gather", noted)
    return found


@world(2)
def test_a_step_between_unshards_by_hand(rank: Rank) -> None:
    """Only what was gathered before the step is gathered again."""
    model = sharded(rank, (4, 4), (4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ones(rank)).sum().backward()
    first, second = model.layers
    with rank.monkeypatch.context() as patch:
        found = gathers(rank, patch)
        first.unshard()
        optimizer.step()
        second.unshard()
        model(ones(rank))
    assert found == ["layers.0", "layers.1", "layers.0"]


@world(2)
def test_a_write_between_unshards_by_hand_that_skips_empty_shards(rank: Rank) -> None:
    """The second rank has no element of the first layer, so that nothing of the write to it shows there."""
    model = sharded(rank, (4, 1), (1, 4), (4, 4))
    first, second, third = model.layers
    written = [param for param in (first.weight, second.weight) if param._local_tensor.numel() > 0]
    with torch.no_grad():
        third.weight.fill_(1.0)
        model(ones(rank))
        for layer in model.layers:
            layer.reshard()
        third.unshard()
        first.unshard()
        for param in written:
            param._local_tensor.fill_(3.0)
        second.unshard()  # the write to it must not be forgotten: on the second rank it stands for that to the first
        assert model(ones(rank)).tolist() == [[3.0 * 4 * 3 * 4] * 4]
