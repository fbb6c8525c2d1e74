"""Writes the state of each root when the last watched step has ended, for ``shardproof state``."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardproof.harness.states import snapshot
from shardproof.harness.watching.model import LayoutOf
from shardproof.harness.watching.names import objects_of, parameters_of
from shardproof.harness.watching.optimizers import optimizers_of_process, parameters_in


class StateWriter:
    """Writes the states of a loop's roots, once.

    Args:
        folder: where to; None for nowhere.
        layout: as of ``shardproof.state()``.
    """

    def __init__(self, folder: Path | None, layout: LayoutOf | None) -> None:
        self._folder, self._layout = folder, layout
        self.is_over = folder is None

    def write(
        self, roots: Sequence[Sequence[nn.Module]], labels: Sequence[str], place: tuple[int, int], step: int
    ) -> str:
        """Write what this rank has of each root, with the optimizers that step it, and return the line that says so.

        Args:
            roots: of each the modules that the loop calls.
            labels: their names; of one alone, which has the folder itself, it is not used.
            place: the rank, and the number of ranks.
            step: how many steps were made.
        """
        if self.is_over or self._folder is None:
            return ""
        self.is_over = True
        folders = [self._folder / re.sub(r"\W+", "-", one).strip("-") for one in labels]
        folders = folders if len(roots) > 1 else [self._folder]
        every = optimizers_of_process()
        for models, folder in zip(roots, folders, strict=True):
            mine = {id(parameter) for model in models for _, parameter in parameters_of(model)}
            optimizers = [one for one in every if any(id(parameter) in mine for parameter in parameters_in(one))]
            try:
                snapshot.write(
                    models, optimizers, out=folder, place=place, step=step, scheduler=_scheduler_of(optimizers),
                    layout=self._layout, replaces=True, only=mine if len(roots) > 1 else None,
                )  # fmt: skip
            except Exception as error:  # no error of ours may reach the training
                return f"the state is not written: {type(error).__name__}: {error}"
        where = " and ".join(map(str, folders))
        return (
            f"the state after {step} steps is in {where}: compare a checkpoint of it by shardproof state {where} FILE"
        )


def _scheduler_of(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """Return the scheduler of some optimizers; None where there is none, or there are several."""
    every = objects_of(torch.optim.lr_scheduler.LRScheduler)
    found = [one for one in every if any(getattr(one, "optimizer", None) is each for each in optimizers)]
    inside = {id(inner) for one in found for inner in getattr(one, "_schedulers", ())}
    outer = [one for one in found if id(one) not in inside]
    return outer[0] if len(outer) == 1 else None
