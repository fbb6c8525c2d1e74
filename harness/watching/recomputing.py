"""Random numbers that modules draw in a forward, and again where backward recomputes it, as in checkpointing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.utils.checkpoint
from torch import nn

from shardproof.harness.tensors import private


class _Call(NamedTuple):
    """A call of a module: the state of the generators when it begins, and when it has ended."""

    begin: int
    end: int

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn in it."""
        return self.begin != self.end


class Draws:
    """The calls of modules in the forwards of a step, and in recomputations of these."""

    def __init__(self) -> None:
        self._forwards: dict[str, list[_Call]] = {}
        self._recomputed: dict[str, list[tuple[_Call, bool]]] = {}
        #: The calls that have begun: the name of the module, the state, and whether each is a recomputation.
        self._begun: list[tuple[str, int, bool]] = []

    def begin(self, name: str, *, is_forward: bool) -> None:
        """Note that a call begins; ``is_forward`` whether a forward with gradients has begun and not ended."""
        is_recomputed = _is_in_backward()
        if is_recomputed or is_forward:
            self._begun.append((name, _state(), is_recomputed))

    def end(self, name: str, module: nn.Module) -> None:
        """Note that a call has ended; those within that an exception has left are none."""
        if not any(begun == name for begun, *_ in self._begun):
            return
        begun, state, is_recomputed = self._begun.pop()
        while begun != name:
            begun, state, is_recomputed = self._begun.pop()
        call = _Call(state, _state())
        if is_recomputed and call.draws:
            is_torch = type(module).__module__.startswith("torch.nn.") and _is_in_checkpoint()
            self._recomputed.setdefault(name, []).append((call, is_torch))
        elif not is_recomputed:
            self._forwards.setdefault(name, []).append(call)

    def redrawn(self) -> dict[str, bool]:
        """Return the innermost modules whose recomputation draws other random numbers than their forwards.

        By name, whether the module is torch's and torch recomputes it. A forward that draws none may have saved its
        own, and so may a recomputation.
        """
        found = {}
        for name, calls in self._recomputed.items():
            forwards = self._forwards.get(name, [])
            begun = {one.begin for one in forwards}
            if any(one.draws for one in forwards) and any(one.begin not in begun for one, _ in calls):
                found[name] = all(is_torch for _, is_torch in calls)
        return {
            name: is_torch
            for name, is_torch in found.items()
            if not any(other != name and (not name or other.startswith(f"{name}.")) for other in found)
        }


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
    states = [torch.get_rng_state().numpy().tobytes()]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        states.append(f"{generator.initial_seed()} {generator.get_offset()}".encode())
    return hash(tuple(states))
