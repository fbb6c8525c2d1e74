"""How a case trains: draws batches, makes steps and checks them, acts between microbatches, trains what was drawn."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch

from shardproof.harness.adapters.base import Clip, OptimizerFactory
from shardproof.harness.models import drawn, mixed, optim, parallel, shapes, ties
from shardproof.harness.models.drawn import Block, Part, Plan
from shardproof.harness.models.experts import Mixture, Routing, divide_experts
from shardproof.harness.models.plain import mean_square
from shardproof.harness.models.recomputation import Computations, Means, compiler, recompute
from shardproof.harness.models.trainings import Step, Training, needs_of
from shardproof.harness.parity.pair import Pair
from shardproof.harness.parity.rank import Rank, Seeds
from shardproof.harness.parity.run import Loss, Run
from shardproof.testing.compare import check_exact

__all__ = [
    "Block",
    "Computations",
    "Loss",
    "Means",
    "Mixture",
    "NoneAfter",
    "Part",
    "Plan",
    "Routing",
    "Step",
    "Training",
    "after_microbatches",
    "batches",
    "check_twins",
    "checked_steps",
    "compiler",
    "divide_experts",
    "mixed",
    "needs_of",
    "optim",
    "parallel",
    "recompute",
    "shapes",
    "ties",
    "tokens",
    "train_and_check",
    "train_drawn",
]

#: After which steps, counted from 0, gradients are set to None; after the others, to zeros.
NoneAfter = Literal["all", "even", "odd"]

#: Below the norm of the gradients of nearly all drawn models, so that clipping scales them.
_MAX_NORM = 1e-5


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
        pictures = (run.step([(batch,)], loss=mean_square) for run in runs)
        check_exact(rank, *pictures, step=step, why=why)


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


def train_drawn(rank: Rank, training: Training) -> Pair:
    """Train what a training describes, beside the baseline and the oracle, and compare all of it (collective).

    The model is in float64 and compared in float32: a drawn sum may cancel to any degree, and what remains of it must
    not be rounding noise. It raises as :meth:`Pair.check`.
    """
    rank.seeds = Seeds(training.seed, training.seed + 1)
    torch.manual_seed(training.seed)
    plan = training.plan
    units = plan.units()
    pair = rank.pair(
        drawn.DrawnModel(plan).double(), units=units, baseline="replicated", optimizer=_optimizer(training),
        compared_as=torch.float32, prepare=functools.partial(drawn.recompute, plan=plan), **_options(rank, training),
    )  # fmt: skip
    if training.prefetches:
        names = [unit[0] for unit in units]
        following = {name: [other] for name, other in itertools.pairwise(names)}
        pair.adapter.prefetch(forward=following, backward={other: [name] for name, (other,) in following.items()})
    for number, step in enumerate(training.steps):
        _step(rank, pair, training, step, number)
    pair.check()
    return pair


def _options(rank: Rank, training: Training) -> dict[str, Any]:
    shape = (training.replicas, rank.world_size // max(1, training.replicas))
    return {
        "mesh": rank.mesh(shape, ("replicate", "shard")) if training.replicas else rank.mesh(),
        "reshard_after_forward": training.reshard_after_forward,
        "microbatches": training.microbatches,
        "accumulation": training.accumulation,
        "clip": Clip(_MAX_NORM, float(training.clip)) if training.clip else None,
        "must_clip": None,
        "offload": "pageable" if training.offloads else None,
        "flat_parameters": training.flat_parameters,
        "find_unused_parameters": any(block.runs != "always" for _, block in training.plan.blocks()),
    }


def _optimizer(training: Training) -> OptimizerFactory:
    factories = {"sgd": optim.sgd(momentum=0.0), "momentum": optim.sgd(), "adam": optim.adam()}
    return factories[training.optimizer]


def _step(rank: Rank, pair: Pair, training: Training, step: Step, number: int) -> None:
    shape = (training.rows, training.plan.dim)
    for index, mode in enumerate(step.evaluates):
        pair.evaluate((_batch(rank, number, shape, -1 - index), 2 * number + index), mode=mode)
    if step.unshards:
        pair.adapter.unshard()
    first = number * training.microbatches
    batches = [
        (_batch(rank, number, shape, index).requires_grad_(training.inputs_require_grad), first + index)
        for index in range(training.microbatches)
    ]
    loss = functools.partial(_loss, uses=step.uses)
    pair.step(batches, loss=loss, set_to_none=step.set_to_none, ahead=training.ahead)


def _batch(rank: Rank, step: int, shape: tuple[int, ...], microbatch: int) -> torch.Tensor:
    return rank.batch(step, shape, microbatch=microbatch).double()


def _loss(outputs: tuple[torch.Tensor, ...], *, uses: tuple[int, ...]) -> torch.Tensor:
    """The sum of the mean squares of the outputs that are used, each with a weight of its own."""
    return torch.stack([mean_square(outputs[index]) * (1 + index) for index in uses]).sum()
