"""Stages of a pipeline, each sharded by itself, under torch's schedules, next to one model with all their layers."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardproof.testing import Rank, Run, models
from shardproof.testing.compare import Finding, Location, Oracle, Piece, Stage, distance, numbers_of
from shardproof.testing.make import run_by_units
from shardproof.testing.train import optim

#: Of the stages of a pipeline of two ranks, the numbers of layers.
DEPTHS = {"GPipe": (1, 2), "1F1B": (1, 2), "Interleaved1F1B": (1, 3, 2, 1)}
DIM = 9
MICROBATCHES = 3


def train_stages(
    rank: Rank,
    *,
    schedule: str,
    calls: str,
    shares: bool,
    watch: Callable[[Run], object] = lambda run: None,
    **options: Any,
) -> None:
    """Train two steps of a pipeline of two ranks, whose stages are sharded over two, and compare them (collective).

    Args:
        schedule: a key of :data:`DEPTHS`, torch's name of the schedule.
        calls: "one" of the schedule in a step, or "two", or "two-deferred": the second alone reduces.
        shares: whether the stages of a rank share streams and buffers.
        watch: called with the run of each stage of this rank.
        **options: of the runs; delays are those of a rank's collectives in all of its stages.
    """
    from torch.distributed import pipelining  # its import is slow, and most cases do not need it

    mesh, depths = rank.mesh((2, 2), ("pp", "dp")), DEPTHS[schedule]
    here, number_of_calls = mesh["pp"].get_local_rank(), 1 if calls == "one" else 2
    towers = [models.Tower(dim=DIM, depth=depth) for depth in depths]
    whole = nn.Sequential(*towers).to(rank.device)
    double, single = torch.float64, torch.float32
    oracle, baseline = (Oracle(whole, optimizer=optim.sgd(), clip=None, dtype=one) for one in (double, single))
    runs = {
        number: run_by_units(rank, models.copy_of(towers[number]), mesh=mesh["dp"], optimizer=optim.sgd(), **options)
        for number in range(here, len(towers), 2)
    }
    for run in runs.values():
        watch(run)
    roots: list[Any] = [run.adapter.module for run in runs.values()]
    if shares:
        type(runs[here].adapter).share_comm_ctx(roots)
    # Torch's schedules know torch's class: where another defers, user code ends its backwards, and divides.
    deferring = roots if calls == "two-deferred" else []
    by_schedule = [root for root in deferring if isinstance(root, FSDPModule)]
    by_hand = [root for root in deferring if root not in by_schedule]
    scales = calls == "one" or bool(by_schedule)
    loss_divisor = number_of_calls * (1 if scales else MICROBATCHES)
    kind: Any = getattr(pipelining, f"Schedule{schedule}")
    choices = {"scale_grads": scales, "defer_reduce_grad_wait": bool(by_schedule) and not shares}
    stages = [
        pipelining.PipelineStage(root, number, len(towers), rank.device, group=mesh["pp"].get_group())
        for number, root in zip(runs, roots, strict=True)
    ]
    made = kind(
        stages if len(stages) > 1 else stages[0],
        n_microbatches=MICROBATCHES,
        loss_fn=lambda output, _: models.mean_square(output) / loss_divisor,
        **{name: value for name, value in choices.items() if name in inspect.signature(kind).parameters},
    )
    for root in by_hand:
        root.set_manual_backward_finalization(True)
    for step in range(2):
        batch = rank.batch(step, (2 * MICROBATCHES * number_of_calls, DIM), mesh=mesh["dp"])
        with runs[here].recorder.during("backward"):
            for root in by_hand:
                root.set_requires_gradient_sync(False)
            for number, part in enumerate(batch.chunk(number_of_calls)):
                ends: Any = {"finalize_gradients": number == number_of_calls - 1} if by_schedule else {}
                made.step(part, **ends) if here == 0 else made.step(target=torch.zeros_like(part), **ends)
            for root in by_hand:
                root.set_requires_gradient_sync(True)
                root.finalize_backward()
        found = {}
        for number, run in runs.items():
            # Copied at once: in the time of the other models' steps, what nobody waited for would have come.
            gradients = _copied(run.adapter.gradients())
            run.adapter.step()
            found[number] = {Stage.GRADIENT: gradients, Stage.PARAMETER: _copied(run.adapter.parameters())}
            run.adapter.zero_grad(set_to_none=True)
        parts = [[(part,)] for part in rank.exchange_tensors(batch)[:2]]
        expected, plain = (one.step(parts, loss=models.mean_square) for one in (oracle, baseline))
        for number, pieces in found.items():
            for stage, name in ((Stage.GRADIENT, "gradients"), (Stage.PARAMETER, "parameters")):
                others = getattr(plain, name), getattr(expected, name)
                _compare(rank, pieces[stage], *others, stage, number, step)
    runs[here].perturbation.assert_met()


def _copied(pieces: Mapping[str, Piece | None]) -> dict[str, Piece | None]:
    return {
        name: None if piece is None else dataclasses.replace(piece, tensor=piece.tensor.clone())
        for name, piece in pieces.items()
    }


def _compare(
    rank: Rank, found: Mapping[str, Piece | None], plain: Mapping[str, torch.Tensor | None],
    expected: Mapping[str, torch.Tensor | None], kind: Stage, number: int, step: int,
) -> None:  # fmt: skip
    """Compare the tensors of a pipeline stage with those of one model, and fail on all ranks alike (collective)."""
    finding = None
    for name, piece in found.items():
        full, other = (one[f"{number}.{name}"] for one in (expected, plain))
        assert full is not None and other is not None
        if piece is None:
            # With flat parameters a rank has no gradient of a parameter of which it holds no element.
            continue
        parts = piece.tensor, piece.cut(other), piece.cut(full)
        result = distance(*parts, magnitude=float(full.abs().max()))
        if result.is_too_far and finding is None:
            text, numbers = numbers_of(result, dict(zip(("sharded", "baseline", "oracle"), parts, strict=True)))
            where = Location(stage=kind, step=step, rank=rank.index, name=f"{number}.{name}")
            finding = Finding(where, text, numbers=numbers)
    rank.agree(finding, title="a stage of the pipeline diverges from the one model")
