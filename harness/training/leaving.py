"""Writes the state of each root after its last watched step, for ``shardproof state``."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardproof.harness.states import snapshot
from shardproof.harness.watching import hooks
from shardproof.harness.watching.model import LayoutOf
from shardproof.harness.watching.names import objects_of, parameters_of
from shardproof.harness.watching.optimizers import optimizers_of_process, parameters_in


class _Due:
    """A root whose last watched step has ended: its state is written when it goes on.

    Then schedulers have stepped, and the loop has saved its own checkpoint. It goes on with the next call of a module,
    or the next step of an optimizer.
    """

    def __init__(self, write: Callable[[], None], models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        self._write = write
        self._handles = [one.register_forward_pre_hook(self._on_call) for one in models]
        self._handles += [one.register_step_pre_hook(self._on_step) for one in optimizers]

    @hooks.quiet
    def _on_call(self, *_: Any) -> None:
        self.end()

    @hooks.quiet
    def _on_step(self, *_: Any) -> None:
        self._write()  # its hooks are being walked over, so none is removed here

    def end(self) -> None:
        """Write the state, and remove the hooks."""
        for one in self._handles:
            one.remove()
        self._write()


class StateWriter:
    """Writes the states of a loop's roots, of each once, when its last watched step has ended.

    Args:
        folder: where to; None for nowhere.
        layout: as of ``shardproof.state()``.
        say: takes the line that says where the states are, or why they are not.
    """

    def __init__(self, folder: Path | None, layout: LayoutOf | None, say: Callable[[str], None]) -> None:
        self._folder, self._layout, self._say = folder, layout, say
        self._due: dict[int, _Due] = {}
        self._written: dict[int, tuple[int, Path]] = {}
        self._error = ""
        self._has_all = self._has_said = False

    def add(self, number: int, models: Sequence[nn.Module], label: str, place: tuple[int, int], step: int) -> None:
        """Write what this rank has of a root, with the optimizers that step it, as soon as the root goes on.

        Args:
            number: of the root; nothing happens if it was added.
            models: the modules that the loop calls.
            label: its name; empty for one alone, which has the folder itself.
            place: the rank, and the number of ranks.
            step: how many steps were made of it.
        """
        if self._folder is None or number in self._due:
            return
        folder = self._folder / re.sub(r"\W+", "-", label).strip("-")
        mine = {id(parameter) for model in models for _, parameter in parameters_of(model)}
        every = optimizers_of_process()
        optimizers = [one for one in every if any(id(parameter) in mine for parameter in parameters_in(one))]

        def write() -> None:
            if number in self._written or self._error:
                return
            self._written[number] = step, folder
            try:
                snapshot.write(
                    models, optimizers, out=folder, place=place, step=step, scheduler=_scheduler_of(optimizers),
                    layout=self._layout, replaces=True, only=mine if label else None,
                )  # fmt: skip
            except Exception as error:  # no error of ours may reach the training
                self._error = f"the state is not written: {type(error).__name__}: {error}"
            self._tell()

        self._due[number] = _Due(write, models, optimizers)

    def has_all(self) -> None:
        """Take note that no further root is added."""
        self._has_all = True
        self._tell()

    def end(self) -> None:
        """Write what is not written, as the loop ends."""
        for one in self._due.values():
            one.end()
        self.has_all()

    def _tell(self) -> None:
        is_over = self._error or (self._has_all and len(self._written) == len(self._due))
        if self._has_said or not is_over or not self._written:
            return
        self._has_said = True
        steps = [str(step) for step in dict.fromkeys(step for step, _ in self._written.values())]
        where = [str(folder) for _, folder in self._written.values()]
        line = (
            f"the state after {' and '.join(steps)} steps is in {' and '.join(where)}: compare a checkpoint of it by "
            f"shardproof state {where[0]} FILE"
        )
        self._say(self._error or line)


def _scheduler_of(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """Return the scheduler of some optimizers; None where there is none, or there are several."""
    every = objects_of(torch.optim.lr_scheduler.LRScheduler)
    found = [one for one in every if any(getattr(one, "optimizer", None) is each for each in optimizers)]
    inside = {id(inner) for one in found for inner in getattr(one, "_schedulers", ())}
    outer = [one for one in found if id(one) not in inside]
    return outer[0] if len(outer) == 1 else None
