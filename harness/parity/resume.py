"""Saves and loads a run through ``torch.distributed.checkpoint``, as a training script does."""

from __future__ import annotations

import pathlib

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from shardproof.harness.parity.run import Run


def save(run: Run, directory: pathlib.Path) -> None:
    """Write model and optimizer (collective)."""
    state_dict_saver.save(run.adapter.checkpoint(), checkpoint_id=directory)


def load(run: Run, directory: pathlib.Path) -> None:
    """Read what :func:`save` wrote into the run, whose sizes and layout must be the same (collective)."""
    state = run.adapter.checkpoint()
    assert state["optimizer"]["state"], "an optimizer without state would resume from any"
    state_dict_loader.load(state, checkpoint_id=directory)
    run.adapter.restore(state)


@torch.no_grad()
def spoil(run: Run) -> None:
    """Overwrite every parameter and the optimizer's state, in place: nothing of it may survive a load."""
    for parameter in run.adapter.module.parameters():
        parameter.fill_(0.125)
    assert run.adapter.optimizer is not None
    for state in run.adapter.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.fill_(7.0)
