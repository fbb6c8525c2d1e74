"""Checks a training on the ranks of a world: each trains a step and writes what it saw, and the reference judges it."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.harness.judging.finding import Divergence, Location, Stage, step_label
from shardproof.harness.judging.observations import Measured
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.reference import Answer, Reference, file_of
from shardproof.harness.training.request import NotCheckable, Request, functions_of
from shardproof.harness.training.switches import Switches
from shardproof.harness.training.trained_model import TrainedModel, digest_of, save

Exchange = Callable[[Any], list[Any]]
"""Gathers one value from every rank, in rank order."""


@dataclasses.dataclass
class Checked:
    """What is known of a training after its check: equal on all ranks.

    Attributes:
        own: what the run file stores of it.
        measured: the distances of each step and stage.
        answers: what the reference said, by step.
    """

    own: dict[str, Any]
    measured: list[Measured]
    answers: list[Answer]


def check(
    request: Request, *, rank: int, mesh: DeviceMesh, device: torch.device, backend: str, folder: str,
    exchange: Exchange, explains: bool = False, note: Callable[[Checked], None],
) -> None:  # fmt: skip
    """Train the steps of a request, and judge each before the next one begins (collective).

    Args:
        folder: for the files of all ranks.
        note: takes what is known, also before this raises.

    Raises:
        Divergence: on every rank, with the text of what diverges first, or of what cannot be checked.
    """
    with contextlib.ExitStack() as stack:
        switches = stack.enter_context(Switches(request.off, notes=request.bisect))
        reference = None
        if rank == 0:
            reference = Reference(request, folder, device=device, backend=backend, explains=explains)
            stack.callback(reference.close)
        functions = switches.over(functions_of(request))
        trained = _together(exchange, lambda: TrainedModel(request, functions, "run", mesh, device, explains=explains))
        stack.callback(trained.close)
        _refuse(exchange(_shapes(trained)), exchange(_random(trained.model)))
        trained.know(exchange(trained.flat), rank)
        save(file_of(folder, rank, -1), trained.state())
        answers: list[Answer] = []
        for step in range(request.steps + 1):
            # A step is judged while the next one trains.
            if step < request.steps:
                _train(request, trained, step, rank=rank, folder=folder, exchange=exchange)
            if step > 0:
                told = exchange(reference.answer(step - 1) if reference is not None else None)
                (answer,) = [one for one in told if one]
                if rank == 0 and not request.keep:
                    _remove(folder, request.size, step - 1)
                if "refused" in answer:
                    raise Divergence(answer["refused"], Location(stage=Stage.SHARDING, step=step - 1))
                if "failed" in answer:
                    raise RuntimeError(f"the reference failed:\n{answer['failed']}")
                answers.append(answer)
                note(_checked(request, answers, switches))
                if answer["found"]:
                    raise Divergence(_text(request, step - 1, answer), location_of(answer["found"][0], step - 1))
            if reference is not None and step < request.steps:
                reference.ask(step)


def _train(
    request: Request, trained: TrainedModel, step: int, *, rank: int, folder: str, exchange: Exchange
) -> None:  # fmt: skip
    """Train a step, and write what this rank has seen of it; when this returns, all ranks have."""
    microbatches = _together(exchange, lambda: trained.data(step, request.data_rank(rank)))
    generator = torch.get_rng_state()
    seen = trained.step(microbatches)
    more = {"forwards": seen.forwards, "norm_types": seen.norm_types, "is_fully_sharded": seen.is_fully_sharded}
    data = list(map(digest_of, microbatches))
    save(file_of(folder, rank, step, "events"), seen.events, data=data, **more)
    save(file_of(folder, rank, step), seen.state)
    if any(exchange(not torch.equal(generator, torch.get_rng_state()))):
        raise Divergence("check: the model or step() draws random numbers, and different ones in the reference",
                         Location(stage=Stage.SHARDING))  # fmt: skip


def _together(exchange: Exchange, make: Callable[[], Any]) -> Any:
    """Make something on every rank; one that cannot be checked raises on all of them."""
    made, refused = None, ""
    try:
        made = make()
    except NotCheckable as error:
        refused = str(error)
    if told := [one for one in exchange(refused) if one]:
        raise Divergence(told[0], Location(stage=Stage.SHARDING))
    return made


def _shapes(trained: TrainedModel) -> dict[str, tuple[int, ...]]:
    named = trained.watch.model.parameters()
    return {name: () if name in trained.flat else tuple(parameter.shape) for name, parameter in named}


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _random(model: nn.Module) -> str:
    """Return the name of a module that draws random numbers, or of one with statistics of a batch; else nothing."""
    for name, module in model.named_modules():
        if isinstance(module, _DROPOUT) and module.p > 0 and module.training:
            return f"draws random numbers in forward (dropout in {name!r}): eval(), or p=0"
        if isinstance(module, _BATCH_NORM) and module.training:
            return f"has statistics of a batch in {name!r}, which depend on how data are divided: eval()"
    return ""


def _refuse(shapes: list[dict[str, tuple[int, ...]]], random: list[str]) -> None:
    """Raise on all ranks if the model cannot be checked."""
    told = next((f"check: the model {one}" for one in random if one), "")
    for rank, mine in enumerate(shapes):
        for name in dict.fromkeys([*shapes[0], *mine]):
            if shapes[0].get(name) != mine.get(name):
                told = (f"check: parallelize() gave {name!r} {shapes[0].get(name, 'to no module')} on rank 0 and "
                        f"{mine.get(name, 'to no module')} on rank {rank}")  # fmt: skip
    if told:
        raise Divergence(told, Location(stage=Stage.SHARDING))


def _remove(folder: str, size: int, step: int) -> None:
    for rank in range(size):
        os.remove(file_of(folder, rank, step - 1))
        os.remove(file_of(folder, rank, step, "events"))


def _checked(request: Request, answers: list[Answer], switches: Switches) -> Checked:
    """Put together what the steps showed."""
    last = answers[-1]
    distances, measured = [], []
    for step, answer in enumerate(answers):
        for one in answer["measured"]:
            fields = {name: one[name] for name in ("name", "sharded_ulps", "baseline_ulps", "allowed_ulps")}
            stage = next(stage for stage in Stage if stage.value == one["stage"])
            measured.append(Measured(stage, step, **fields))
            distances.append({"module": one["module"], "stage": one["stage"], "step": step, **fields})
    notes: dict[str, int] = {}
    for answer in answers:
        for text, count in answer["notes"].items():
            notes[text] = notes.get(text, 0) + count
    own = {
        "model": request.model, "mesh": dict(request.mesh), "data": list(request.data_dims), "factor": last["factor"],
        "loss_factor": last["loss_factor"], "signature": last["signature"], "lines": last["lines"],
        "axes": sorted(switches.used),
        "compared": sum(answer["compared"] for answer in answers), "distances": distances,
        "notes": [f"{text} ({count})" if count > 1 else text for text, count in notes.items()],
    }  # fmt: skip
    return Checked(own, measured, answers)


def location_of(found: Mapping[str, Any], step: int) -> Location:
    element = tuple(found["element"]) if found["element"] else None
    return Location(stage=Stage[found["stage"]], step=step, rank=found["rank"], name=found["name"], element=element)


def _text(request: Request, step: int, answer: Answer) -> str:
    """Return what diverges first, and what that looks like."""
    first = answer["found"][0]
    lines = [f"{request.model}, {request.implementation}, mesh {request.mesh_text}: {location_of(first, step)}"]
    lines += [f"  {line.strip()}" for line in first["text"].splitlines()]
    lines += [f"  {line}" for line in answer["lines"]]
    ranks, size = answer["ranks"], request.size
    where = "every rank" if len(ranks) == size else ranks_of(ranks)
    lines.append(f"  in {step_label(step)} {answer['count']} tensors of this stage diverge, on {where}; "
                 f"{answer['compared']} tensors matched before")  # fmt: skip
    return "\n".join(lines)
