"""What cases of many chapters shard: a model by its own units, with a baseline or without, cut over a mesh."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.testing import Capability, Pair, Rank, Run, each_value, models, needs
from shardproof.testing.tensors import local_of
from shardproof.testing.trained import parallel

#: (replicate, shard) sizes on four ranks. The second shards nothing: such a group has nothing to gather, and averages
#: over its replicas alone.
REPLICAS = pytest.mark.parametrize(
    "shape", [(2, 2), pytest.param((4, 1), marks=needs(Capability.SINGLE_RANK))], ids=["2x2", "4x1"]
)


def subjects(names: Any, values: Iterable[Any], **options: Any) -> Callable[[Any], Any]:
    """``parametrize`` by separate subjects of a case, such as calls or errors: ``quick`` keeps an item of each."""

    def mark(case: Any) -> Any:
        each = each_value(*([names] if isinstance(names, str) else names))
        return each(pytest.mark.parametrize(names, values, **options)(case))

    return mark


def pair_by_units(rank: Rank, model: Any, **options: Any) -> Pair:
    """:meth:`Rank.pair` of a model, sharded by the units that it names (collective)."""
    return rank.pair(model, units=model.units(), **options)


def tower(rank: Rank, *, dim: int = 9, **options: Any) -> Pair:
    """A pair of three layers of different sizes, each a unit, and the root's own (collective)."""
    return pair_by_units(rank, models.Tower(dim=dim), **options)


def run_by_units(rank: Rank, model: Any, **options: Any) -> Run:
    """:meth:`Rank.run` of a model, sharded by the units that it names (collective)."""
    return rank.run(model, units=model.units(), **options)


def run_and_plain(rank: Rank, model: Any, **options: Any) -> tuple[Run, Any]:
    """:func:`run_by_units`, and a plain copy of the model on the rank's device (collective)."""
    plain = models.copy_of(model).to(rank.device)
    return run_by_units(rank, model, **options), plain


def two_runs(rank: Rank, model: Any, **options: Any) -> tuple[Run, Run]:
    """Two runs of copies of a model, alike, sharded by the units that it names (collective)."""
    first, second = (run_by_units(rank, models.copy_of(model), **options) for _ in range(2))
    return first, second


def cut_over(mesh: DeviceMesh, plan: Callable[..., nn.Module], **arguments: Any) -> dict[str, Any]:
    """The options of a model that a plan cuts over ``mesh["tp"]``, and that is then sharded over ``mesh["dp"]``."""
    return {"mesh": mesh["dp"], "prepare": functools.partial(plan, mesh=mesh["tp"], **arguments)}


def pair_of_mlps(rank: Rank, mesh: DeviceMesh, model: Any, *, sequence: bool = False, **options: Any) -> Pair:
    """A pair of :class:`parallel.MLPStack`, cut over ``mesh["tp"]`` and sharded over ``mesh["dp"]`` (collective)."""
    return pair_by_units(rank, model, **cut_over(mesh, parallel.parallelize_mlps, sequence=sequence), **options)


def everywhere(pair: Pair) -> list[dict[str, nn.Parameter]]:
    """The parameters of the run, the baseline and the oracle."""
    runs = (pair.adapter, pair.baseline.adapter)
    return [*(adapter.named_parameters() for adapter in runs), dict(pair.oracle.model.named_parameters())]


def check_left(state: Any, call: Callable[[], Any]) -> None:
    """Check that a call leaves a state dict as it was: its entries, their order, and the same tensors and values."""
    before = _entries(state)
    copies = {
        name: [one.clone() for one in _parts(value)]
        for name, value in before.items()
        if isinstance(value, torch.Tensor)
    }
    call()
    after = _entries(state)
    assert [*after] == [*before], f"the state dict that user code passed has the entries {[*after]}, not {[*before]}"
    replaced = [name for name in copies if after[name] is not before[name]]
    assert not replaced, f"the state dict that user code passed has other tensors under {', '.join(replaced)}"
    written = [name for name, parts in copies.items() if not all(map(torch.equal, _parts(after[name]), parts))]
    assert not written, f"the tensors that user code passed have other values under {', '.join(written)}"
    others = [name for name in before.keys() - copies if after[name] != before[name]]
    assert not others, f"the state dict that user code passed has other values under {', '.join(sorted(others))}"


def _parts(value: Any) -> list[torch.Tensor]:
    """Return this rank's part of a tensor; of a ShardedTensor there may be several, or none."""
    return [one.tensor for one in value.local_shards()] if hasattr(value, "local_shards") else [local_of(value)]


def _entries(value: Any, name: str = "") -> dict[str, Any]:
    """All leaves of nested dicts and lists, by their paths."""
    if not isinstance(value, (Mapping, list)):
        return {name: value}
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    found = (_entries(part, f"{name}.{key}" if name else str(key)) for key, part in parts)
    return {path: leaf for one in found for path, leaf in one.items()}
