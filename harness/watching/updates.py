"""What the optimizers of a step find and leave, and whose step it is where one steps inside of another."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardproof.harness.judging.finding import Stage
from shardproof.harness.tensors import fingerprints
from shardproof.harness.tensors.fingerprints import bits_of_all, host_rows
from shardproof.harness.tensors.layouts import layout_of
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching.model import Model
from shardproof.harness.watching.names import name_of
from shardproof.harness.watching.observation import Takes
from shardproof.harness.watching.optimizers import age_of, parameters_in, resting_of, settings_of, state_of
from shardproof.harness.watching.pending import Pending, ordered
from shardproof.harness.watching.records import Narrow, Optimizer, Parameter
from shardproof.harness.watching.samples import Samples, is_narrow
from shardproof.harness.watching.standing import Standing


class Strangers:
    """The optimizers that have stepped and have none of the parameters of the roots.

    Attributes:
        steps: by the names of their classes, the last step in which each did, and whether the process groups were
            destroyed by then.
        said: the lines about what they have, which the model's ``unseen`` has too.
        are_destroyed: whether the process groups are destroyed.
    """

    def __init__(self) -> None:
        self.steps: dict[str, tuple[int, bool]] = {}
        self.said: set[str] = set()
        self.are_destroyed = False

    def note(self, kind: str, step: int) -> None:
        """Note that an optimizer of a class has stepped."""
        self.steps[kind] = step, self.are_destroyed

    def say(self, texts: Collection[str], model: Model) -> None:
        """Add lines about what they have to what is not seen of a model."""
        self.said.update(texts)
        model.unseen.update(texts)

    def forget(self, model: Model) -> None:
        """Forget them, and take their lines back."""
        self.steps.clear()
        model.unseen -= self.said


class Nesting:
    """The optimizers in whose step the process is, and how many had stepped when it began.

    One in another's step is what steps: torchtitan, for one, has a container of optimizers that is an Optimizer itself.

    Args:
        only: the optimizers whose steps count; empty for each that steps.

    Attributes:
        evaluations: how often the closure was called that the step of an optimizer was given.
        is_in_closure: whether it is being called.
    """

    def __init__(self, only: Sequence[torch.optim.Optimizer]) -> None:
        self.evaluations = 0
        self.is_in_closure = False
        self._only = [weakref.ref(one) for one in only]
        self._open: list[tuple[int, int]] = []
        #: Those that have ended inside of another's step.
        self._ended: list[torch.optim.Optimizer] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def only(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose steps count; empty for each that steps."""
        return [one for ref in self._only if (one := ref()) is not None]

    def __len__(self) -> int:
        return len(self._open)

    def counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the steps of an optimizer count."""
        return not self._only or bool(self._open) or any(one() is optimizer for one in self._only)

    def begin(self, optimizer: torch.optim.Optimizer, stepped: int) -> bool:
        """Begin the step of an optimizer when so many have stepped; whether it is inside of another's, is returned."""
        # One that is here already has raised in its last step.
        self._leave(optimizer)
        is_nested = bool(self._open)
        self._open.append((id(optimizer), stepped))
        return is_nested

    def begin_anew(self) -> None:
        """A step has ended: the closure of an optimizer has begun the next one."""
        self._open = [(one, 0) for one, _ in self._open]

    def end(self, optimizer: torch.optim.Optimizer) -> tuple[int | None, bool]:
        """End its step; how many had stepped when it began (None if it has not), and whether it had a closure."""
        found = dict(self._open).get(id(optimizer)), self.evaluations > 0
        self._leave(optimizer)
        self.evaluations = 0
        return found

    def take_ended(self, optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
        """Return those that have ended, this one last; none inside of another's step.

        What the outer one does after it belongs to the step, as ZeroRedundancyOptimizer broadcasts.
        """
        self._ended.append(optimizer)
        if self._open:
            return []
        ended, self._ended = self._ended, []
        return ended

    def watched(self, closure: Callable[..., Any], on_end: Callable[[], None]) -> Callable[..., Any]:
        """Return a closure in its place, which tells when it has been called, and when it has ended."""

        @functools.wraps(closure)
        def watched(*inputs: Any) -> Any:
            self.evaluations += 1
            self.is_in_closure = True
            try:
                value = closure(*inputs)
            finally:
                self.is_in_closure = False
            on_end()
            return value

        return watched

    def _leave(self, optimizer: torch.optim.Optimizer) -> None:
        self._open = [one for one in self._open if one[0] != id(optimizer)]


def closure_of(args: Any, kwargs: Any) -> Any:
    """Return the closure that the step of an optimizer is given, or None."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def with_closure(args: Any, kwargs: Any, closure: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the arguments of a step with another closure."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


class Updates:
    """What the optimizers of a step find and leave.

    Attributes:
        stepped: the optimizers that have stepped, in order.
        at_step: the gradients that they find.
        held: by name of a parameter that they have, what is known of it: its bits before and after, and its state's.
        end_it: whether the step ends with the last of them, as far as this rank sees.
        standing: what stands besides when the first of them begins; None before that.
    """

    def __init__(self, model: Model, takes: Takes) -> None:
        self.stepped: list[Optimizer] = []
        self.at_step: dict[str, Pending] = {}
        self.held: dict[str, dict[str, Any]] = {}
        self.end_it = model.engine is not None
        self.standing: Standing | None = None
        self._model, self._takes = model, takes
        self._samples = Samples()
        self._is_look = False

    def hold(self, groups: Mapping[int, Mapping[str, Any]]) -> None:
        """Read what an optimizer will update.

        Args:
            groups: the group of each parameter that it has, by id.
        """
        self._read_standing()
        number = len(self.stepped)
        mine = [(name, parameter) for name, parameter in self._model.parameters() if id(parameter) in groups]
        new = [(name, parameter) for name, parameter in mine if name not in self.held]
        # One object for all parameters of a group, which goes to other ranks once.
        settings = {key: settings_of(group) for key, group in {id(one): one for one in groups.values()}.items()}
        for name, parameter in new if self._takes.digests and self._model.engine is None else ():
            self._samples.take(name, parameter)
        for name, before in self._weights(new, Stage.INITIAL):
            self.held[name] = {"before": before, "state": {}}
        for name, parameter in mine:
            if name in self.held:
                group = groups[id(parameter)]
                rate: Any = group.get("lr")
                is_number = rate is not None and not isinstance(rate, torch.Tensor)
                self.held[name] |= {
                    "optimizer": number, "lr": float(rate) if is_number else rate, "settings": settings[id(group)],
                    "is_frozen": not parameter.requires_grad,
                }  # fmt: skip

    def _read_standing(self) -> None:
        if self.standing is None and self._takes.digests and self._model.engine is None:
            self.standing = self._model.standing()

    def release(self, mine: Collection[int], states: Callable[[nn.Parameter], dict[str, torch.Tensor]]) -> None:
        """Read what an optimizer has left.

        Args:
            mine: the ids of its parameters.
            states: returns the tensors of its state of a parameter, by key.
        """
        places: list[tuple[dict[str, Any], str]] = []
        tensors: list[torch.Tensor] = []
        stepped = {name: one for name, one in self._model.parameters() if name in self.held and id(one) in mine}
        for name, after in self._weights(list(stepped.items()), Stage.PARAMETER):
            self.held[name]["after"] = after
            self._samples.compare(name, stepped[name])
            own = states(stepped[name])
            for key, value in own.items() if self._takes.sink is not None else ():
                place = self._model.place(name, value) if value.ndim else layout_of(value)
                self._takes.emit(Stage.OPTIMIZER_STATE, value, place, parameter=name, state=key)
            if self._takes.digests:
                self.held[name]["narrow"] = {
                    key: name_of(value.dtype) for key, value in own.items() if value.ndim and is_narrow(value)
                }
                places += [(self.held[name]["state"], key) for key in own]
                tensors += map(local_of, own.values())
        for (where, key), bits in zip(places, bits_of_all(tensors), strict=True):
            where[key] = bits

    def release_all(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Read what a step has left: an inner optimizer's parameters and states, and the outer one's that are left."""
        done: set[int] = set()
        for optimizer in optimizers:
            mine = {id(one) for one in parameters_in(optimizer)} - done
            self.release(mine, functools.partial(state_of, optimizer))
            for name, one in self._model.parameters():
                if id(one) in mine and name in self.held:
                    self.held[name]["age"] = age_of(optimizer, one)
            done |= mine

    def look(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Read what optimizers have, and all other parameters, without a step between what is before and after it."""
        self._is_look = True
        self._read_standing()
        for optimizer in optimizers:
            self.hold({id(one): group for group in optimizer.param_groups for one in group["params"]})
            self.release_all([optimizer])
            self.stepped.append(Optimizer(type(optimizer).__name__, len(self.held), len(self.held), shapes_agree=False))
        for held in self.held.values():
            held["before"] = None

    def has_all(self, own: Collection[str]) -> bool:
        """Whether no other optimizer can belong to the step: each parameter that has or had a gradient is stepped.

        Args:
            own: the names of those that had one; where it is dropped, another rank may step it, and send it after that.
        """
        with_gradient = (name for name, one in self._model.parameters() if one.grad is not None or name in own)
        names = set(with_gradient)
        return bool(names) and names <= self.held.keys()

    def _weights(
        self, mine: Sequence[tuple[str, nn.Parameter]], stage: Stage
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Emit what the optimizer updates of parameters, and yield its bits, if there are digests."""
        if (engine := self._model.engine) is None:
            bits: Sequence[torch.Tensor | None] = [None] * len(mine)
            if self._takes.digests:
                bits = bits_of_all([local_of(parameter) for _, parameter in mine])
            for (name, parameter), one in zip(mine, bits, strict=True):
                self._takes.emit(stage, parameter, self._model.place(name, parameter), parameter=name)
                yield name, one
            return
        for name, parameter in mine:
            weights = engine.weights(parameter)
            if weights is None:
                continue
            self._takes.emit(stage, weights, layout_of(weights), parameter=name)
            # Of both in one: what the model computes with, and what is moved, perhaps by less than the other shows.
            own, whole = bits_of_all([local_of(parameter), weights])
            yield name, own + 31 * whole

    def parameters(self) -> dict[str, Parameter]:
        """Return what a record has of each parameter: the host reads the bits."""
        live = dict(self._model.parameters())
        names, tensors = [], []
        for name, held in self.held.items():
            for key, value in {"before": held["before"], "after": held.get("after"), **held.get("state", {})}.items():
                if value is not None:
                    names.append((name, key))
                    tensors.append(value)
        if self._takes.digests and not self.end_it:
            # What other ranks step, and send, has come when the step does not end with this rank's own optimizer.
            others = self._others(live)
            names += [(name, "after") for name, _ in others]
            tensors += bits_of_all([local_of(one) for _, one in others])
        bits = {key: tuple(row) for key, row in zip(names, host_rows(tensors), strict=True)}
        is_known = self._takes.digests and self._model.engine is None
        resting = resting_of(live, self.held) if is_known and not self._is_look else {}
        counts = self._samples.counts()
        return {
            name: self._parameter(name, one, bits, resting.get(name, ""), counts.get(name, (0, 0)))
            for name, one in live.items()
        }

    def _others(self, live: Mapping[str, nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that train, or all where this is a look, that no optimizer of the rank steps."""
        mine = [(name, one) for name, one in live.items() if name not in self.held]
        return [(name, one) for name, one in mine if one.requires_grad or self._is_look]

    def _parameter(
        self,
        name: str,
        parameter: nn.Parameter,
        bits: Mapping[tuple[str, str], tuple[int, ...]],
        resting: str,
        counts: tuple[int, int],
    ) -> Parameter:
        place = self._model.place(name, parameter)
        held = self.held.get(name, {})
        rate = held.get("lr")
        before, after = bits.get((name, "before")), bits.get((name, "after"))
        own, states = fingerprints.strided(local_of(parameter)), held.get("narrow", {})
        is_still = before is not None and before == after and own.is_floating_point() and own.numel() > 0
        return Parameter(
            box=None if place is None else place.box, mesh=() if place is None else place.mesh,
            trains=parameter.requires_grad, dtype=name_of(parameter.dtype), optimizer=held.get("optimizer"),
            lr=float(rate) if rate is not None else None, settings=held.get("settings", {}), before=before, after=after,
            is_frozen=held.get("is_frozen", False),
            largest=float(ordered(own).abs().max()) if is_still else None,
            narrow=Narrow(*counts, states) if counts[1] or states else None,
            state={key: bits[name, key] for key in held.get("state", {})}, age=held.get("age"), resting=resting,
        )  # fmt: skip
