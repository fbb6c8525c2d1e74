"""What cases of many chapters do: shard a model by its own units, train step by step, compare two runs."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.testing import Capability, Pair, Rank, Run, check_exact, each_value, models, needs, parallel

#: (replicate, shard) sizes on four ranks. The second shards nothing: such a group has nothing to gather, and averages
#: over its replicas alone.
REPLICAS = pytest.mark.parametrize(
    "shape", [(2, 2), pytest.param((4, 1), marks=needs(Capability.SINGLE_RANK))], ids=["2x2", "4x1"]
)
#: After which steps, counted from 0, gradients are set to None; after the others, to zeros.
NoneAfter = Literal["all", "even", "odd"]


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


def checked_steps(
    pair: Pair, batches: Iterable[Any], *, set_to_none: NoneAfter = "all", **options: Any
) -> Iterator[int]:
    """Train a step on each batch, compare it, and yield its number (collective).

    Args:
        batches: each is drawn when its step begins.
        set_to_none: after which steps gradients are set to None.
        **options: of every :meth:`Pair.step`.
    """
    for step, batch in enumerate(batches):
        pair.step(batch, set_to_none=set_to_none == "all" or (step % 2 == 0) == (set_to_none == "even"), **options)
        pair.check()
        yield step


def batches(rank: Rank, steps: int, shape: tuple[int, ...], *, microbatches: int = 0, **options: Any) -> Iterator[Any]:
    """:meth:`Rank.batch` of each step, or with ``microbatches`` a list of so many."""
    return _drawn(functools.partial(rank.batch, shape=shape, **options), steps, microbatches)


def tokens(rank: Rank, steps: int, shape: tuple[int, ...], *, microbatches: int = 0, **options: Any) -> Iterator[Any]:
    """:meth:`Rank.tokens` of each step, or with ``microbatches`` a list of so many."""
    return _drawn(functools.partial(rank.tokens, shape=shape, **options), steps, microbatches)


def _drawn(draw: Callable[..., torch.Tensor], steps: int, microbatches: int) -> Iterator[Any]:
    for step in range(steps):
        yield [draw(step, microbatch=number) for number in range(microbatches)] if microbatches else draw(step)


def train_and_check(pair: Pair, batches: Iterable[Any], **options: Any) -> None:
    """Make all :func:`checked_steps` (collective)."""
    for _ in checked_steps(pair, batches, **options):
        pass


def check_twins(rank: Rank, runs: tuple[Run, Run], batches: Iterable[Any], *, why: str, first: int = 0) -> None:
    """Train two runs on each batch, from step ``first``: they have the same bits after each step (collective)."""
    for step, batch in enumerate(batches, first):
        pictures = (run.step([(batch,)], loss=models.mean_square) for run in runs)
        check_exact(rank, *pictures, step=step, why=why)


def everywhere(pair: Pair) -> list[dict[str, nn.Parameter]]:
    """The parameters of the run, the baseline and the oracle."""
    runs = (pair.adapter, pair.baseline.adapter)
    return [*(adapter.named_parameters() for adapter in runs), dict(pair.oracle.model.named_parameters())]


def after_microbatches(rank: Rank, pair: Pair, act: Callable[[], object]) -> None:
    """From here on, call ``act`` after each microbatch but the last of a step."""
    context = pair.adapter.microbatch

    @contextlib.contextmanager
    def acting(*, is_last: bool) -> Iterator[None]:
        with context(is_last=is_last):
            yield
        if not is_last:
            act()

    rank.monkeypatch.setattr(pair.adapter, "microbatch", acting)
