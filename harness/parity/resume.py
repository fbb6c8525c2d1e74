"""Saves and loads a run through ``torch.distributed.checkpoint``, as a training script does."""

from __future__ import annotations

import pathlib

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from shardproof.harness.parity.run import Run


def save(run: Run, directory: pathlib.Path) -> None:
    """Write the model's and the optimizer's state into ``directory`` (collective)."""
    state_dict_saver.save(run.adapter.checkpoint(), checkpoint_id=directory)


def load(run: Run, directory: pathlib.Path) -> None:
    """Load a checkpoint into a run (collective).

    Args:
        run: a run with the sizes and the layout of the one that was saved, and with optimizer state.
        directory: the directory that :func:`save` wrote.

    Raises:
        AssertionError: the optimizer has no state to load into.
    """
    state = run.adapter.checkpoint()
    assert state["optimizer"]["state"], "the optimizer has no state: a resume that restored none of it would pass"
    state_dict_loader.load(state, checkpoint_id=directory)
    run.adapter.restore(state)


@torch.no_grad()
def spoil(run: Run) -> None:
    """Overwrite all parameters and tensors of optimizer state in place, so that a load must restore every one."""
    for parameter in run.adapter.module.parameters():
        parameter.fill_(0.125)
    assert run.adapter.optimizer is not None
    for state in run.adapter.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.fill_(7.0)
