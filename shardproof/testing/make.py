"""How a case makes what it trains: a model sharded by its own units, with a baseline or without, cut over a mesh."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.harness.adapters.base import (
    Accumulation,
    Adapter,
    Clip,
    FullParams,
    OptimizerFactory,
    Precision,
    Settings,
    StateForm,
    Trainee,
    Traits,
    WrapPolicy,
    padded_to_rows,
)
from shardproof.harness.adapters.config import NamedDimensions
from shardproof.harness.adapters.fsdp1 import as_fsdp1
from shardproof.harness.adapters.registry import built_in_with
from shardproof.harness.collectives.delays import Delay
from shardproof.harness.models import parallel
from shardproof.harness.models.plain import Tower, copy_of
from shardproof.harness.parity.pair import Pair
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.run import Run
from shardproof.harness.simulation.training import Simulation

__all__ = [
    "Accumulation",
    "Adapter",
    "Clip",
    "Delay",
    "FullParams",
    "NamedDimensions",
    "OptimizerFactory",
    "Precision",
    "Settings",
    "Simulation",
    "StateForm",
    "Trainee",
    "Traits",
    "WrapPolicy",
    "as_fsdp1",
    "built_in_with",
    "cut_over",
    "everywhere",
    "padded_to_rows",
    "pair_by_units",
    "pair_of_mlps",
    "run_and_plain",
    "run_by_units",
    "sharded",
    "tower",
    "two_runs",
]


def pair_by_units(rank: Rank, model: Any, **options: Any) -> Pair:
    """:meth:`Rank.pair` of a model, sharded by the units that it names (collective)."""
    return rank.pair(model, units=model.units(), **options)


def tower(rank: Rank, *, dim: int = 9, **options: Any) -> Pair:
    """A pair of three layers of different sizes, each a unit, and the root's own (collective)."""
    return pair_by_units(rank, Tower(dim=dim), **options)


def run_by_units(rank: Rank, model: Any, **options: Any) -> Run:
    """:meth:`Rank.run` of a model, sharded by the units that it names (collective)."""
    return rank.run(model, units=model.units(), **options)


def run_and_plain(rank: Rank, model: Any, **options: Any) -> tuple[Run, Any]:
    """:func:`run_by_units`, and a plain copy of the model on the rank's device (collective)."""
    plain = copy_of(model).to(rank.device)
    return run_by_units(rank, model, **options), plain


def two_runs(rank: Rank, model: Any, **options: Any) -> tuple[Run, Run]:
    """Two runs of copies of a model, alike, sharded by the units that it names (collective)."""
    first, second = (run_by_units(rank, copy_of(model), **options) for _ in range(2))
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


def sharded(rank: Rank, model: nn.Module, *, optimizer: OptimizerFactory | None = None, **options: Any) -> Adapter:
    """Shard a model by the implementation under test, and nothing else (collective).

    The options are those of :meth:`Rank.config`. The model stays on the device on which it is, where :meth:`Rank.run`
    moves it to the rank's.
    """
    return rank.implementation(model, optimizer=optimizer, config=rank.config(**options))
