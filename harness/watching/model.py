"""The model that is watched: its roots, and the names, places and readers of what they have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import nn

from shardproof.harness.tensors.fingerprints import Box, bits_of_all, bits_on_host
from shardproof.harness.tensors.layouts import Layout, layout_of
from shardproof.harness.watching.engines import Engine, is_engine
from shardproof.harness.watching.gathered import Gathered
from shardproof.harness.watching.modes import modes_of, rounded_constants
from shardproof.harness.watching.names import (
    attributes_of,
    buffers_of,
    compiles,
    is_called,
    is_compiled,
    modules_of,
    parameters_of,
    replaced_in,
    tied_in,
    without_turn,
)
from shardproof.harness.watching.pending import readable
from shardproof.harness.watching.recomputing import Draws
from shardproof.harness.watching.records import Beside, Crossed, Crossing, Follower, ModuleRecord
from shardproof.harness.watching.standing import Standing, Standings

#: How messages name a root itself.
THE_MODEL = "the model"

LayoutOf = Callable[[str, torch.Tensor], Layout | None]
"""Tells where the elements of a parameter or a gradient belong, from its name and the tensor, or returns None."""


class Model:
    """One model, which may be several roots, on one rank.

    Args:
        layout: where a tensor does not say itself where its elements belong.

    Attributes:
        roots: the modules that the loop calls.
        flat_places: where the rank's parts of parameters begin in flat ones, and how many elements they have in full.
        engine: DeepSpeed's, if the root is one.
        unseen: what cannot be seen, one line each.
        followers: tells what is seen of copies of it, which no optimizer steps.
        crossings: tells what is seen of collectives in autograd.
        crossed: tells what has crossed boundaries of pipeline stages.
    """

    def __init__(self, layout: LayoutOf | None) -> None:
        self.roots: list[nn.Module] = []
        self.flat_places: dict[str, tuple[int, int]] = {}
        self.engine: Engine | None = None
        self.unseen: set[str] = set()
        self.followers: Callable[[], list[Follower]] = list
        self.crossings: Callable[[], list[Crossing]] = list
        self.crossed: Callable[[], list[Crossed]] = list
        self._layout = layout
        self._without: frozenset[str] = frozenset()  # parameters of other roots, which are watched with these
        self._names: dict[int, str] = {}  # canonical names of modules
        self._uncertain: set[int] = set()  # modules whose forward is compiled, and so is not seen
        self._compiled: set[str] = set()  # the names of the outermost of them
        self._shapes: dict[str, torch.Size] = {}
        self._standings = Standings()

    def add(self, root: nn.Module, others: Collection[int] = ()) -> list[tuple[str, nn.Module]]:
        """Add a root, and return the modules of which hooks see the forward, each once, by canonical name.

        Args:
            others: the ids of parameters that are of other roots.
        """
        self.roots.append(root)
        self._without |= {name for name, one in parameters_of(root) if id(one) in others}
        if is_engine(root):
            self.engine = Engine(root)
            self.unseen.add(f"what {type(root).__name__} does to gradients in its step, where it clips them")
        compiled: set[int] = set()
        for name, module in modules_of(root):
            if is_compiled(module):
                self._compiled |= {name or THE_MODEL} if id(module) not in compiled else set()
                compiled |= {id(inner) for inner in module.modules()}
        found: dict[int, tuple[str, nn.Module]] = {}
        for name, module in modules_of(root):
            self._names.setdefault(id(module), name)
            if id(module) in compiled:
                self._uncertain.add(id(module))
            if id(module) not in compiled - {id(root)}:
                found.setdefault(id(module), (name, module))
        return list(found.values())

    def forget(self) -> None:
        """Forget the roots, and what was seen of them; others take their place."""
        for seen in (self.roots, self._names, self._uncertain, self._compiled, self._shapes, self.unseen):
            seen.clear()
        self.engine, self._without = None, frozenset()

    def replace(self, root: nn.Module) -> None:
        """Replace the only root by another one with the same parameters."""
        self.roots[:] = [root]
        self._names = {id(module): name for name, module in modules_of(root)}
        self._uncertain.clear()
        self._standings.forget()

    def know(self, shapes: Mapping[str, torch.Size], flat_places: dict[str, tuple[int, int]]) -> None:
        """Take the full shapes of parameters, and where the rank's parts of those in flat ones begin."""
        self._shapes |= shapes
        self.flat_places = flat_places

    def find_shape(self, name: str, shape: torch.Size) -> None:
        """Take the shape that a forward finds of a parameter, if none is known."""
        self._shapes.setdefault(name, shape)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all roots by canonical name, each once, by its first name."""
        once: set[int] = set()
        for root in self.roots:
            for name, parameter in parameters_of(root):
                if id(parameter) not in once and name not in self._without:
                    once.add(id(parameter))
                    yield name, parameter

    def has(self, name: str) -> bool:
        """Whether a parameter of this name is of these roots, and of no other root."""
        return name not in self._without

    @property
    def is_compiled(self) -> bool:
        """Whether a module of the roots is compiled."""
        return bool(self._compiled)

    def bits_of_buffers(self) -> dict[str, torch.Tensor]:
        """Return the bits of the buffers that the modules of user code have, on their devices, by canonical name."""
        found = {name: buffer for root in self.roots for name, buffer in buffers_of(root)}
        return dict(zip(found, bits_of_all([*found.values()]), strict=True))

    def standing(self) -> Standing:
        """Read what stands besides parameters and optimizer states, on its devices."""
        found = {name: one for root in self.roots for name, one in attributes_of(root)}
        attributes = dict(zip(found, bits_of_all([*found.values()]), strict=True))
        return self._standings.read(self.roots, self.parameters(), self.bits_of_buffers(), attributes)

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the reduced gradient of a parameter; of an engine, which leaves none in ``.grad``, the whole one."""
        return parameter.grad if self.engine is None else self.engine.gradient(parameter)

    def place(self, name: str, tensor: torch.Tensor) -> Layout | None:
        """Return where the elements of a parameter or its gradient belong, or None where that is not known."""
        if self._layout is not None and (found := self._layout(name, tensor)) is not None:
            return found
        if name in self.flat_places:
            shape = self._shapes.get(name)
            start, full = self.flat_places[name]
            if shape is None or shape.numel() != full:
                return None
            if tensor.numel() == full:  # also what no_sync() has left: this rank's own gradient, which is not divided
                return Layout(Box(tuple(shape)))
            return Layout(Box(tuple(shape), flat=(start, start + tensor.numel())))
        return layout_of(tensor)

    def place_unreduced(self, name: str, gradient: torch.Tensor) -> Layout:
        """Return where the elements of a gradient belong that nothing has reduced, nor put into a flat one."""
        return (self._layout and self._layout(name, gradient)) or layout_of(gradient)

    def read(self, name: str, gradient: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        """Return the elements of a gradient, or None and note that it cannot be read."""
        if isinstance(found := readable(gradient, layout), str):
            self.unseen.add(f"the gradient of {name!r}, which is {found}")
            return None
        return found

    def tied(self) -> list[tuple[str, ...]]:
        """Return the sets of names that are one parameter."""
        return tied_in(self.roots)

    def record(
        self, called: Mapping[int, bool], gathered: Gathered, buffers: Mapping[str, torch.Tensor],
        with_gradient: Collection[str], draws: Draws,
    ) -> ModuleRecord:  # fmt: skip
        """Return what a record has of the modules.

        Args:
            called: by module that was called in the step, whether it was with gradients enabled.
            gathered: what forwards have found gathered.
            buffers: the bits of buffers when the step began, by name.
            with_gradient: the names of parameters that have one.
            draws: what modules draw in forwards and in recomputations.
        """
        idle, detached = without_turn(self.roots, self._names.keys() - self._uncertain, called)
        unhooked = {self._outermost(one, called) for one in idle if one in with_gradient} if compiles() else set()
        dropouts = [one for root in self.roots for one in root.modules() if isinstance(one, nn.Dropout)]
        return ModuleRecord(
            idle, detached, gathered.names, gathered.take_outdated(), self.tied(), *replaced_in(self.roots),
            draws.redrawn(),
            has_dropout=any(one.training and one.p > 0 for one in dropouts),
            buffers=bits_on_host(buffers), compiled=sorted(self._compiled),
            unhooked=sorted(unhooked), beside=self._beside(called, draws.moved_again()),
        )  # fmt: skip

    def _beside(self, called: Mapping[int, bool], again: Collection[str]) -> Beside:
        modes = modes_of(self.roots, called, again)
        return Beside(self.followers(), modes, self.crossings(), rounded_constants(self.roots), self.crossed())

    def _outermost(self, parameter: str, called: Mapping[int, bool]) -> str:
        """Return the name of the outermost module that was not called, of those in which a parameter is."""
        modules = {name: module for root in self.roots for name, module in modules_of(root)}
        name = found = parameter.rpartition(".")[0]
        while name:
            name = name.rpartition(".")[0]
            if (module := modules.get(name)) is None or id(module) in called:
                break
            found = name if is_called(module) else found
        return found or THE_MODEL
