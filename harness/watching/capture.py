"""Copies what the modules of a model compute while a step runs, for ``--explain``; never in an ordinary run.

A module's forward hooks copy the parameters and buffers that it finds and the tensors that it returns. Hooks of tensors
copy the gradients of outputs, and those of parameters before the implementation reduces them: the tensor that a module
finds under a parameter's name is where autograd puts the gradient of this rank alone. Nothing of an implementation is
called, gathered or waited for, and what a property would compute is not read.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardproof.harness.judging.finding import Stage
from shardproof.harness.tensors.pieces import original_name
from shardproof.harness.tensors.trees import tensors_of
from shardproof.harness.watching.observation import Observation, Observed

# The arguments of a forward, as cases pass them.


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one forward, and what a loss takes besides its output."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    labels: tuple[Any, ...] = ()


def as_inputs(arguments: Any) -> Inputs:
    """Normalize the arguments of one forward: ``Inputs``, a tuple of positional arguments, or a single one."""
    if isinstance(arguments, Inputs):
        return arguments
    return Inputs(arguments if isinstance(arguments, tuple) else (arguments,))


Pass = Literal["forward", "backward"]
"""A part of a step in which modules compute."""

#: The suffix that ``checkpoint_wrapper`` adds to the name of the module inside it.
_RECOMPUTED = "_checkpoint_wrapped_module"


class Capture:
    """Copies what one model computes.

    Args:
        modules: the modules of the model before sharding, by name, wrappers of activation checkpointing among them.
        parameters: the full names of its parameters; a parameter that modules share has one for each.
        divides: by what the loss was multiplied before backward, by which gradients are divided.
    """

    def __init__(self, modules: Mapping[str, nn.Module], parameters: Iterable[str], *, divides: int = 1) -> None:
        self._divides = divides
        self._events: list[Observed] = []
        self._pass: Pass | None = None
        self._microbatch = 0
        self._calls: collections.Counter[str] = collections.Counter()
        self._open: dict[str, list[int]] = {}
        self._leaves: set[int] = set()
        self._of_tensors: list[RemovableHandle] = []
        self._own: dict[str, list[str]] = {}
        for full in parameters:
            owner, _, last = full.rpartition(".")
            self._own.setdefault(owner, []).append(last)
        # The module inside a wrapper owns its parameters, and has its name.
        named = {name.removesuffix(_RECOMPUTED).removesuffix("."): module for name, module in modules.items()}
        once = {id(module): name for name, module in reversed(named.items())}
        self._of_modules: list[RemovableHandle] = []
        for name, module in named.items():
            if once[id(module)] == name:
                # Last of all hooks: the implementation has gathered by then, and has not freed yet what it will.
                before, after = functools.partial(self._before, name), functools.partial(self._after, name)
                self._of_modules.append(module.register_forward_pre_hook(before))
                self._of_modules.append(module.register_forward_hook(after))

    @contextlib.contextmanager
    def during(self, part: Pass, microbatch: int) -> Iterator[None]:
        """Copy what happens in this context."""
        self._pass, self._microbatch = part, microbatch
        if part == "forward":
            self._calls.clear()
            self._open.clear()
        try:
            yield
        finally:
            self._pass = None

    def take(self) -> list[Observed]:
        """Return what was copied since the last call, in order."""
        events, self._events = self._events, []
        for handle in self._of_tensors:
            handle.remove()
        self._of_tensors.clear()
        self._leaves.clear()
        return events

    @property
    def last(self) -> Observed | None:
        """The last that was copied of a step that has not ended."""
        return self._events[-1] if self._events else None

    def close(self) -> None:
        """Remove all hooks and forget all copies."""
        self.take()
        for handle in self._of_modules:
            handle.remove()
        self._of_modules.clear()

    def _before(self, name: str, module: nn.Module, args: Any) -> None:
        if self._pass is None:
            return
        if self._pass == "forward":
            call = self._calls[name]
            self._calls[name] += 1
            self._open.setdefault(name, []).append(call)
            for full, value in self._parameters_of(name, module):
                self._add(Stage.GATHERED, name, full, call, 0, value)
            for last, buffer in module._buffers.items():
                if buffer is not None and _is_plain(buffer):
                    self._add(Stage.BUFFER, name, _joined(name, last), call, 0, buffer)
        for full, value in self._parameters_of(name, module):
            # One that is recomputed has its hook already, unless its values are made anew for the recomputation.
            self._watch_parameter(name, full, value)

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._pass is None:
            return
        call = 0
        if self._pass == "forward":
            call = self._open[name].pop() if self._open.get(name) else 0
        elif self._calls[name] != 1:
            return  # which of several calls is recomputed here cannot be told
        for index, tensor in enumerate(tensors_of(output)):
            if not _is_plain(tensor):
                continue
            if self._pass == "forward":
                self._add(Stage.MODULE_OUTPUT, name, "", call, index, tensor)
            if tensor.requires_grad and torch.is_grad_enabled():
                add = functools.partial(self._add_gradient, (Stage.OUTPUT_GRADIENT, name, ""), self._microbatch, call)
                self._of_tensors.append(tensor.register_hook(functools.partial(add, index)))

    def _parameters_of(self, name: str, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """The plain tensors that stand for a module's own parameters, by full names."""
        found = []
        for last in self._own.get(name, ()):
            # Not by getattr: a property may gather.
            value = module._parameters.get(last, vars(module).get(last))
            if value is not None and _is_plain(value):
                found.append((_joined(name, last), value))
        return found

    def _watch_parameter(self, module: str, full: str, value: torch.Tensor) -> None:
        if not value.requires_grad or not torch.is_grad_enabled():
            return
        if value.is_leaf:
            # Its one hook serves all forwards until the step ends.
            if id(value) in self._leaves:
                return
            self._leaves.add(id(value))
        microbatch = None if value.is_leaf else self._microbatch
        add = functools.partial(self._add_gradient, (Stage.OWN_GRADIENT, module, full), microbatch, 0, 0)
        self._of_tensors.append(value.register_hook(add))

    def _add_gradient(
        self, of: tuple[Stage, str, str], microbatch: int | None, call: int, index: int, gradient: torch.Tensor
    ) -> None:
        if self._pass != "backward" or not _is_plain(gradient):
            return
        before, self._microbatch = self._microbatch, self._microbatch if microbatch is None else microbatch
        self._add(*of, call, index, gradient)
        self._microbatch = before

    @torch.no_grad()
    def _add(self, stage: Stage, module: str, parameter: str, call: int, index: int, tensor: torch.Tensor) -> None:
        copied = tensor.detach().clone()
        if self._divides != 1 and stage in (Stage.OUTPUT_GRADIENT, Stage.OWN_GRADIENT):
            copied /= self._divides
        self._events.append(Observation(stage, module, parameter, self._microbatch, call, index, None, "", copied))


def capture_of(model: nn.Module, *, divides: int = 1) -> Capture:
    """Make the capture of a model that is not sharded."""
    return Capture(dict(model.named_modules(remove_duplicate=False)), names_of(model), divides=divides)


def names_of(model: nn.Module) -> list[str]:
    """Return the names of a model's parameters; one that modules share has a name for each."""
    return [original_name(name) for name, _ in model.named_parameters(remove_duplicate=False)]


def during(capture: Capture | None, part: Pass, microbatch: int) -> contextlib.AbstractContextManager[None]:
    """Return the context of :meth:`Capture.during`, or one that does nothing without a capture."""
    return contextlib.nullcontext() if capture is None else capture.during(part, microbatch)


def taken(capture: Capture | None) -> Sequence[Observed]:
    """Return what a capture has copied since the last call; nothing without a capture."""
    return () if capture is None else capture.take()


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_floating_point()


def _joined(module: str, last: str) -> str:
    return f"{module}.{last}" if module else last
