"""What cases of many chapters do step by step: draw batches, train and compare, call user code between microbatches."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch

from shardproof.testing import Pair, Rank, Run, models
from shardproof.testing.baselines import check_exact

#: After which steps, counted from 0, gradients are set to None; after the others, to zeros.
NoneAfter = Literal["all", "even", "odd"]


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
