"""All roots of a loop: which module is one, whose an optimizer is, and their names."""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardproof.harness.watching import script
from shardproof.harness.watching.boundary import Boundary
from shardproof.harness.watching.model import Model
from shardproof.harness.watching.names import (
    as_list,
    is_wrapped,
    kind_of,
    objects_of,
    parameters_of,
    sharded_by_gathered,
    unwrapped,
)
from shardproof.harness.watching.optimizers import (
    have_shapes,
    optimizers_of_process,
    parameters_in,
    parameters_of_optimizers,
)
from shardproof.harness.watching.pending import few_values


class RootName(NamedTuple):
    """How user code names a root.

    Attributes:
        kind: the name of the class that it has given it.
        call: the expression by which it calls it; empty where it is not known.
    """

    kind: str = ""
    call: str = ""


class Watch(Protocol):
    """The watch of one root, as others of the loop see it."""

    model: Model
    is_stepped: bool

    def forget_strangers(self) -> None:
        """Forget which optimizers were none of a root."""


class Family:
    """The watches of the roots that one loop trains, the first root's first.

    Each parameter is of one root, the first that has it. An optimizer is of each root of which it has a parameter; one
    that has none of any, and no gradient, is of a root whose own parameters no optimizer has, if it was made for it.

    Attributes:
        steps: how many steps of optimizers there were.
        kinds: the classes of the models that the first of them stepped, if no root had been found before it.
        boundary: the inputs and outputs of all roots, which stages of a pipeline send to each other.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.kinds: list[str] = []
        self.boundary = Boundary()
        self._looked_at: tuple[int, Collection[int], weakref.WeakSet[nn.Module]] = (-1, (), weakref.WeakSet())
        #: Of wrapped modules what stands for their values when they were first called.
        self._values: weakref.WeakKeyDictionary[nn.Module, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        self._watches: list[Watch] = []
        self._made_for: list[tuple[weakref.ref[torch.optim.Optimizer], Watch]] = []

    def __len__(self) -> int:
        return len(self._watches)

    def __iter__(self) -> Iterator[Watch]:
        return iter(self._watches)

    def add(self, watch: Watch) -> None:
        """Add the watch of a root; it must know its parameters, or find them before the next step."""
        self._watches.append(watch)

    def remove(self, watch: Watch) -> None:
        """Remove the watch of a root which is none."""
        self._watches.remove(watch)
        self._made_for = [one for one in self._made_for if one[1] is not watch]

    def parameters(self, *, but: Watch | None = None) -> set[int]:
        """Return the ids of the parameters of all roots, or of all but one."""
        return {id(one) for watch in self._watches if watch is not but for _, one in watch.model.parameters()}

    def has_some(self, parameters: Any, *, but: Watch) -> bool:
        """Whether some of these are of other roots than one's, so that their norm is not that of its gradients."""
        if len(self) < 2 or not isinstance(parameters, (list, tuple, torch.Tensor)):
            return False
        others = self.parameters(but=but)
        return any(id(one) in others for one in as_list(parameters))

    def note_step(self, watch: Watch) -> None:
        """Note that an optimizer steps, if a watch is of the first root; where none was found yet, of which models."""
        if self.is_first(watch):
            self.steps += 1
            self.kinds = outermost_of_optimizers() if self.steps == 1 and not watch.model.roots else self.kinds

    def owner(self, optimizer: torch.optim.Optimizer) -> Watch | None:
        """Return the first watch whose optimizer it is; None where it has no parameter of a root."""
        mine = {id(one) for one in parameters_in(optimizer)}
        for watch in self._watches:
            if any(id(one) in mine for _, one in watch.model.parameters()):
                return watch
        return next((watch for made, watch in self._made_for if made() is optimizer), None)

    def is_first(self, watch: Watch) -> bool:
        """Whether a watch is of the first root."""
        return not self._watches or self._watches[0] is watch

    def has_looked_at(self, module: nn.Module) -> bool:
        """Whether a module was looked at in this step, and is no root."""
        return self._looked_at[0] == self.steps and module in self._looked_at[2]

    def own(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of a module that train, and that are of no root."""
        known = self.parameters()
        return [one for _, one in parameters_of(module) if one.requires_grad and id(one) not in known]

    def look_at(self, module: nn.Module, own: Sequence[nn.Parameter]) -> tuple[bool, torch.optim.Optimizer | None]:
        """Return whether a module is a root that trains, and the optimizer made for it that has none of it, if any.

        A module that is none may be one in a later step, as its optimizer may be made later.
        """
        if self._looked_at[0] != self.steps:
            self._looked_at = self.steps, frozenset(parameters_of_optimizers()), weakref.WeakSet()
        if any(id(one) in self._looked_at[1] for one in own):
            return True, None
        made_for = self._find_made_for(own)
        if made_for is None:
            self._looked_at[2].add(module)
            self.note_values(module)
        return made_for is not None, made_for

    def _find_made_for(self, own: Sequence[nn.Parameter]) -> torch.optim.Optimizer | None:
        """Return the optimizer that was made for parameters which no optimizer has: all of its own are dead, and alike.

        As where it was made before they were sharded.
        """
        known = self.parameters() | {id(one) for one in own}
        for optimizer in optimizers_of_process():
            mine = parameters_in(optimizer)
            if any(id(one) in known or one.grad is not None for one in mine) or len(mine) > len(own):
                continue
            if have_shapes(mine, own) and not _are_of_modules(mine):
                return optimizer
        return None

    def note_values(self, module: nn.Module) -> None:
        """Note what a module that is called has, if its gradients are reduced, and may be in no optimizer."""
        if module not in self._values and is_wrapped(module):
            self._values[module] = few_values(parameters_of(module))

    def idle(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the classes and the parameters of wrapped modules that have gradients, and that nothing moves.

        User code may move those that are in no optimizer, or an optimizer copies of them.
        """
        held, found = parameters_of_optimizers() if self._values else {}, []
        stepped = {id(root) for watch in self._watches if watch.is_stepped for root in watch.model.roots}
        for module, before in self._values.items():
            mine = {name: one for name, one in parameters_of(module) if one.requires_grad}
            are_left = all(one.grad is not None and id(one) not in held for one in mine.values())
            if id(module) in stepped or not mine or not are_left:
                continue
            now = few_values(parameters_of(module))
            if len(now) == len(before) and all(map(torch.equal, now, before)):
                found.append((kind_of(unwrapped(module)).__name__, tuple(mine)))
        return sorted(found)

    def take_made_for(self, optimizer: torch.optim.Optimizer, watch: Watch) -> None:
        """Note for which root an optimizer was made that has none of its parameters."""
        self._made_for.append((weakref.ref(optimizer), watch))

    def others_to_come(self) -> bool:
        """Whether optimizers of the process have parameters of modules that are no part of the roots so far."""
        known = self.parameters()
        left = [
            one
            for optimizer in optimizers_of_process()
            for one in parameters_in(optimizer)
            if id(one) not in known and one.requires_grad
        ]
        return bool(left) and _are_of_modules(left)


def outermost_of_optimizers() -> list[str]:
    """Return the classes of the modules of the process that are in no other, and have parameters of optimizers."""
    modules = objects_of(nn.Module)
    inside = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    held = parameters_of_optimizers()
    found = [one for one in modules if id(one) not in inside and any(id(p) in held for _, p in parameters_of(one))]
    return list(dict.fromkeys(kind_of(unwrapped(one)).__name__ for one in found))


def _are_of_modules(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a module of the process has one of these parameters, or gathered ones in the place of them."""
    ids = {id(one) for one in parameters}
    for module in objects_of(nn.Module):
        if any(id(one) in ids for one in vars(module).get("_parameters", {}).values()):
            return True
        if issubclass(type(module), FSDPModule) and any(id(one) in ids for one in sharded_by_gathered(module).values()):
            return True
    return False


def called_as() -> str:
    """Return the expression by which user code calls the module of whose forward a hook runs now: "self.critic".

    By the position of the call in the source, which is read, because what a frame holds may not be kept alive. Empty
    where there is none, or where it is no name.
    """
    frame = sys._getframe(1)
    own = (*script.OWN, f"{torch.__path__[0]}{os.sep}")
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return ""
    position = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if position is None or None in position or position[0] != position[1]:
        return ""
    line = linecache.getline(frame.f_code.co_filename, position[0] or 0, frame.f_globals).encode()
    try:
        call = ast.parse(line[position[2] : position[3]].decode(), mode="eval").body
    except (SyntaxError, UnicodeDecodeError):
        return ""
    return ast.unparse(call.func) if isinstance(call, ast.Call) and _is_name(call.func) else ""


def _is_name(expression: ast.expr) -> bool:
    """Whether an expression names something: a variable, or an attribute or an item of one."""
    if isinstance(expression, (ast.Attribute, ast.Subscript)):
        return _is_name(expression.value)
    return isinstance(expression, ast.Name)


def labels(roots: Iterable[RootName]) -> list[str]:
    """Return how messages name roots.

    By the class where that tells them apart, else by the call as well, else by a number.
    """
    every = list(roots)
    kinds = [kind for kind, _ in every]
    found = []
    for number, (kind, call) in enumerate(every):
        alike = [other for other in every if other[0] == kind]
        if len(alike) == 1:
            found.append(kind)
        elif call and sum(other == call for _, other in alike) == 1:
            found.append(f"{kind} {call!r}")
        else:
            found.append(f"{kind} {kinds[:number].count(kind) + 1}")
    return found
