"""Runs of a :class:`Stateful` model, which cases save and load."""

from __future__ import annotations

from typing import Any

import torch

from shardproof.harness import models
from shardproof.harness.adapters.base import StateForm
from shardproof.harness.casework import states
from shardproof.harness.models import optim
from shardproof.harness.models.stateful import Stateful
from shardproof.harness.parity import resume
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.run import Run, StepPicture

DIM = 5
LR = 1e-2
#: The entries of the model whose values a forward does not change.
SAVED = [name for name, value in Stateful(DIM).state_dict().items() if not name.endswith("calls")]
TRAINED = [name for name, value in Stateful(DIM).named_parameters() if value.requires_grad]


def plain(rank: Rank, *, number: int = 0, for_flat: bool = False, has_extra: bool = False) -> Stateful:
    """The model of :func:`make`, not sharded."""
    torch.manual_seed(rank.seeds.init + number)
    return Stateful(DIM, freezes=not for_flat, has_extra=has_extra)


def make(rank: Rank, number: int, *, for_flat: bool = False, has_extra: bool = False, **options: Any) -> Run:
    """A run whose values and learning rates depend on a number.

    Args:
        rank: this rank.
        number: another has other values, rates and decay.
        for_flat: whether all parameters are trainable and of one group, as those of a flat parameter are.
        has_extra: whether modules have extra state.
        **options: of the run.
    """
    model, lr = plain(rank, number=number, for_flat=for_flat, has_extra=has_extra), LR * (1 + 2 * number)
    optimizer = optim.adamw(lr=lr) if for_flat else optim.in_two_groups("adamw", lr=lr)
    chosen: Any = {"units": model.units(), "optimizer": optimizer} | options
    return rank.run(model, **chosen)


def train(rank: Rank, run: Run, step: int) -> StepPicture:
    """Train one step."""
    batch = rank.batch(step, (3, DIM), mesh=run.adapter.config.mesh)
    return run.step([(batch,)], loss=models.mean_square)


def check_loads(rank: Rank, saved: Run, loaded: Run, form: StateForm, *, steps_first: bool = True) -> None:
    """Save after two steps and a change of the groups' options, load, and compare with the saved state."""
    for step in range(2):
        train(rank, saved, step)
    if steps_first:
        train(rank, loaded, 3)
    assert saved.adapter.optimizer is not None
    for group in saved.adapter.optimizer.param_groups:
        group["lr"], group["weight_decay"] = group["lr"] / 2, group["weight_decay"] / 4
        if "eps" in group:
            group["eps"] = 1e-7
    expected = states.read(rank, saved, form=form)
    states.check_held(rank, saved, expected)
    if form == "sharded":
        resume.save(saved, rank.tmp_path / "checkpoint")
        resume.load(loaded, rank.tmp_path / "checkpoint")
    else:
        loaded.adapter.restore(saved.adapter.checkpoint(form=form), form=form)
    states.check_held(rank, loaded, expected)
    states.check_same(rank, states.read(rank, loaded, form=form), expected)
