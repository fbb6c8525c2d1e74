"""Random numbers that modules draw in a forward, and again where backward recomputes it, as in checkpointing.

Norms move their running statistics in both.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable

import torch
import torch.utils.checkpoint
from torch import nn

from shardproof.harness.tensors import devices, private
from shardproof.harness.watching.following import has_statistics


@dataclasses.dataclass
class _Call:
    """A call of a module.

    Attributes:
        name: of the module.
        is_recomputed: whether it is in a backward.
        begin, end: the state of the generators when it begins, and when it has ended.
        is_torch: of a recomputation, whether the module is torch's, and torch recomputes it.
        is_outer: whether a module within it draws random numbers.
        written: of a norm with running statistics how often these were written when it begins; else None.
    """

    name: str
    is_recomputed: bool
    begin: int
    end: int = 0
    is_torch: bool = False
    is_outer: bool = False
    written: int | None = None

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn in it."""
        return self.begin != self.end


class Draws:
    """The calls of modules in the forwards of a step, and in recomputations of these."""

    def __init__(self) -> None:
        self._forwards: dict[str, list[_Call]] = {}
        self._recomputed: list[_Call] = []
        self._begun: list[_Call] = []
        #: The norms whose running statistics have moved in forwards, and in recomputations.
        self._moved: tuple[set[str], set[str]] = set(), set()

    def begin(self, name: str, module: nn.Module, *, is_forward: bool) -> None:
        """Note that a call begins; ``is_forward`` whether a forward with gradients has begun and not ended."""
        is_recomputed = _is_in_backward()
        if is_recomputed or is_forward:
            self._begun.append(_Call(name, is_recomputed, _state(), written=_written(module)))

    def end(self, name: str, module: nn.Module) -> None:
        """Note that a call has ended."""
        if not any(one.name == name for one in self._begun):
            return
        while (call := self._begun.pop()).name != name:
            pass  # an exception has left it before our hook was there
        call.end = _state()
        if call.written != _written(module):
            self._moved[call.is_recomputed].add(name)
        if call.draws and self._begun:
            self._begun[-1].is_outer = True
        if not call.is_recomputed:
            self._forwards.setdefault(name, []).append(call)
        elif call.draws and not call.is_outer:
            call.is_torch = _is_of_torch(module) and _is_in_checkpoint()
            self._recomputed.append(call)

    def moved_again(self) -> set[str]:
        """Return the norms whose running statistics have moved in forwards and in recomputations of these."""
        return self._moved[False] & self._moved[True]

    def redrawn(self) -> dict[str, bool]:
        """Return the modules whose recomputation draws other random numbers than their forwards.

        By name, whether torch's own code does all of it. Where the forward or the recomputation draws none, user code
        may have saved what the other draws.
        """
        found: dict[str, bool] = {}
        for call in self._recomputed:
            forwards = self._forwards.get(call.name, [])
            if any(one.draws for one in forwards) and all(one.begin != call.begin for one in forwards):
                found[call.name] = found.get(call.name, True) and call.is_torch
        return found


def _written(module: nn.Module) -> int | None:
    """Return how often the buffers of a norm in training mode were written; None of other modules."""
    if not module.training or not has_statistics(module):
        return None
    return sum(one._version for one in module.buffers(recurse=False))


def _is_of_torch(module: nn.Module) -> bool:
    """Whether a module is one of torch that computes something itself."""
    is_container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return type(module).__module__.startswith("torch.nn.") and not is_container


def _is_in_checkpoint() -> bool:
    """Whether torch's checkpoint calls this, of which a forward is recomputed."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back
    return frame.f_code.co_filename == torch.utils.checkpoint.__file__


@functools.cache
def _task() -> Callable[[], int] | None:
    found: Callable[[], int] | None = private.find("torch._C._current_graph_task_id")
    return found


def _is_in_backward() -> bool:
    task = _task()
    return task is not None and task() != -1


def _state() -> int:
    """Return what stands for the states of torch's generators, which no draw leaves as they are."""
    return hash((torch.get_rng_state().numpy().tobytes(), devices.random_state()))
