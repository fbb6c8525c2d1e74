"""What cases of many chapters shard: a model by its own units, with a baseline or without, cut over a mesh."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.testing import Capability, Pair, Rank, Run, each_value, models, needs
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
