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
    """Writes the states of a loop's roots, of each once, when its last watched step has ended.

    Args:
        folder: where to; None for nowhere.
        layout: as of ``shardproof.state()``.
    """

    def __init__(self, folder: Path | None, layout: LayoutOf | None) -> None:
        self._folder, self._layout = folder, layout
        self._written: dict[int, tuple[int, Path]] = {}
        self._error = ""

    def write(self, number: int, models: Sequence[nn.Module], label: str, place: tuple[int, int], step: int) -> None:
        """Write what this rank has of a root, with the optimizers that step it, if it is not written.

        Args:
            number: of the root.
            models: the modules that the loop calls.
            label: its name; empty for one alone, which has the folder itself.
            place: the rank, and the number of ranks.
            step: how many steps were made of it.
        """
        if self._folder is None or self._error or number in self._written:
            return
        folder = self._folder / re.sub(r"\W+", "-", label).strip("-")
        mine = {id(parameter) for model in models for _, parameter in parameters_of(model)}
        every = optimizers_of_process()
        optimizers = [one for one in every if any(id(parameter) in mine for parameter in parameters_in(one))]
        self._written[number] = step, folder
        try:
            snapshot.write(
                models, optimizers, out=folder, place=place, step=step, scheduler=_scheduler_of(optimizers),
                layout=self._layout, replaces=True, only=mine if label else None,
            )  # fmt: skip
        except Exception as error:  # no error of ours may reach the training
            self._error = f"the state is not written: {type(error).__name__}: {error}"

    @property
    def line(self) -> str:
        """What says where the states are, or why not; empty where none was asked for."""
        if self._error or not self._written:
            return self._error
        steps = [str(step) for step in dict.fromkeys(step for step, _ in self._written.values())]
        where = [str(folder) for _, folder in self._written.values()]
        return (
            f"the state after {' and '.join(steps)} steps is in {' and '.join(where)}: compare a checkpoint of it by "
            f"shardproof state {where[0]} FILE"
        )


def _scheduler_of(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """Return the scheduler of some optimizers; None where there is none, or there are several."""
    every = objects_of(torch.optim.lr_scheduler.LRScheduler)
    found = [one for one in every if any(getattr(one, "optimizer", None) is each for each in optimizers)]
    inside = {id(inner) for one in found for inner in getattr(one, "_schedulers", ())}
    outer = [one for one in found if id(one) not in inside]
    return outer[0] if len(outer) == 1 else None
