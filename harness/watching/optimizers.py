"""What the optimizers of a process have: parameters of the model, of other models, and dead ones."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching.names import objects_of, sharded_by_gathered, unwrapped
from shardproof.harness.watching.records import Optimizer

AGE = "step"
"""The key under which optimizers keep how often a parameter was stepped."""

HOW = ("foreach", "fused", "capturable", "differentiable")
"""The entries of a group that say how an update is computed, and not what it is."""

#: Entries of a group that do not decide what an update is, and the learning rate, which is kept by itself.
_NOT_OF_THE_UPDATE = ("lr", "initial_lr", *HOW)


class StepHooks:
    """Calls before and after the step of each optimizer, through one pair of torch's hooks for all that are added.

    A call may be removed in a step: torch's own hooks must not, while others are still to run.
    """

    def __init__(self) -> None:
        self._all: list[_Around] = []
        self._handles: list[Any] = []

    def add(self, before: Callable[..., Any], after: Callable[..., Any]) -> "_Around":
        """Call these, until the handle that is returned is removed."""
        if not self._all:
            self._handles += [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ]
        self._all.append(_Around(self, before, after))
        return self._all[-1]

    def remove(self, one: "_Around") -> None:
        """Call one no more."""
        if one in self._all:
            self._all.remove(one)
            for handle in self._handles if not self._all else ():
                handle.remove()
            self._handles = self._handles if self._all else []

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        found = None
        for one in list(self._all):
            if one in self._all and (new := one.before(optimizer, args, kwargs)) is not None:
                found = args, kwargs = new
        return found

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for one in list(self._all):
            if one in self._all:
                one.after(optimizer, args, kwargs)


class _Around:
    def __init__(self, hooks: StepHooks, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._hooks, self.before, self.after = hooks, before, after

    def remove(self) -> None:
        self._hooks.remove(self)


STEPS = StepHooks()


def optimizers_of_process() -> list[torch.optim.Optimizer]:
    """Return the optimizers of this process."""
    return objects_of(torch.optim.Optimizer)


def parameters_in(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer; one that is being made has none yet."""
    return [one for group in getattr(optimizer, "param_groups", ()) for one in group["params"]]


def parameters_of_optimizers() -> dict[int, str]:
    """Return the ids of what the optimizers of this process have, each with the name of a class that has it."""
    every = optimizers_of_process()
    return {id(one): type(optimizer).__name__ for optimizer in every for one in parameters_in(optimizer)}


def resting_of(parameters: Mapping[str, nn.Parameter], stepped: Collection[str]) -> dict[str, str]:
    """Return which parameters that train are in optimizers of the process that have not stepped, and their classes."""
    left = [name for name, one in parameters.items() if one.requires_grad and name not in stepped]
    held = parameters_of_optimizers() if left else {}  # which reads all objects of the process
    return {name: held[id(parameters[name])] for name in left if id(parameters[name]) in held}


def state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer's state of a parameter, by key; none where that state is no mapping.

    Of a parameter that another rank steps, ZeroRedundancyOptimizer has None once a state dict was loaded.
    """
    states = optimizer.state
    state = states.get(parameter) if isinstance(states, Mapping) else None
    items = state.items() if isinstance(state, Mapping) else ()
    return {str(key): value for key, value in items if isinstance(value, torch.Tensor)}


def age_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> float | None:
    """Return how often an optimizer has stepped a parameter, where it counts in a number of the host; else None."""
    states = optimizer.state
    state = states.get(parameter) if isinstance(states, Mapping) else None
    age = state.get(AGE) if isinstance(state, Mapping) else None
    return float(age) if isinstance(age, (int, float)) else None


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a group of an optimizer but its learning rate: what decides what its step makes of it.

    What a scheduler notes for itself is none, nor how the step is computed; a tensor would have to be waited for.
    """
    return {
        key: value
        for key, value in group.items()
        if key not in _NOT_OF_THE_UPDATE
        and all(isinstance(one, (int, float)) for one in (value if isinstance(value, tuple) else (value,)))
    }


def seen_of(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    roots: Sequence[nn.Module],
    beside: Collection[int] = (),
) -> tuple[Optimizer, set[str]]:
    """Return what an optimizer has of the parameters of the watched roots, and what is not seen of it, in words.

    ``beside`` are the ids of those of other roots, which have watches of their own.
    """
    mine = [one for one in parameters_in(optimizer) if id(one) not in beside]
    live = {id(one) for one in parameters.values()}
    others = [one for one in mine if id(one) not in live]
    dead = [one for one in others if one.grad is None]
    seen = Optimizer(
        kind=type(optimizer).__name__, size=len(mine), live=len(mine) - len(others),
        shapes_agree=have_shapes(dead, parameters.values()), outside=len(others) - len(dead),
        gathered=_count_gathered(dead, roots),
    )  # fmt: skip
    unseen = set[str]()
    if seen.outside:
        which = f"{seen.outside} of the {seen.size} parameters of {seen.kind}"
        model = type(unwrapped(roots[0])).__name__
        unseen.add(f"{which}, which get gradients outside of {model}: name the whole model in doctor(model)")
    return seen, unseen


def have_shapes(dead: Sequence[torch.Tensor], parameters: Collection[nn.Parameter]) -> bool:
    """Whether there are dead parameters, and each has the shape of a full or a local parameter of the model."""
    shapes = {tuple(each.shape) for one in parameters for each in (one, local_of(one))}
    return bool(dead) and all(tuple(one.shape) in shapes for one in dead)


def _count_gathered(dead: Sequence[torch.Tensor], roots: Sequence[nn.Module]) -> int:
    """Return how many dead parameters are what units of FSDP2 have while they are gathered."""
    known = {key for root in roots for key in sharded_by_gathered(root)} if dead else set()
    return sum(id(one) in known for one in dead)
