"""Saves and loads a run through ``torch.distributed.checkpoint``, as a training script does."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from harness.training import Run


def save(run: Run, directory: pathlib.Path) -> None:
    """Write model and optimizer (collective)."""
    state_dict_saver.save(_state(run), checkpoint_id=directory)


def load(run: Run, directory: pathlib.Path) -> None:
    """Read what :func:`save` wrote into the run, whose sizes and layout must be the same (collective)."""
    state = _state(run)
    assert state["optimizer"]["state"], "an optimizer without state would resume from any"
    state_dict_loader.load(state, checkpoint_id=directory)
    set_state_dict(
        run.adapter.module, _optimizer(run), model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


@torch.no_grad()
def spoil(run: Run) -> None:
    """Overwrite every parameter and the optimizer's state, in place: nothing of it may survive a load."""
    for parameter in run.adapter.module.parameters():
        parameter.fill_(0.125)
    for state in _optimizer(run).state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.fill_(7.0)


def _state(run: Run) -> dict[str, Any]:
    model, optimizer = get_state_dict(run.adapter.module, _optimizer(run))
    return {"model": model, "optimizer": optimizer}


def _optimizer(run: Run) -> torch.optim.Optimizer:
    assert run.adapter.optimizer is not None, f"{run.adapter.name} keeps its optimizer to itself"
    return run.adapter.optimizer
