"""Sees calls of user code that concern the process: loss scalers, schedulers, and state dicts of modules."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shardproof.harness.tensors.fingerprints import host_rows, strided
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching import calls
from shardproof.harness.watching.hooks import quiet
from shardproof.harness.watching.loads import Loads
from shardproof.harness.watching.names import objects_of
from shardproof.harness.watching.optimizers import STEPS, optimizers_of_process, parameters_in
from shardproof.harness.watching.passes import Passes, writes
from shardproof.harness.watching.records import ActRecord, Idle, Levelled, Pace

#: How many steps of an optimizer are remembered.
_MOST_STEPS = 16

#: Packages that step a scheduler once for each rank, because its length is that of one rank's training.
_OF_RANKS = ("accelerate.",)

_Rates = tuple[float, ...]


@dataclasses.dataclass
class _Divided:
    """An optimizer whose gradients a loss scaler has divided, and that has not stepped since.

    Attributes:
        left: when a later backward begins, its gradients, each with whether an element is not zero; on its device.
    """

    optimizer: weakref.ref[Any]
    left: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Scheduled:
    """A scheduler that was stepped since its optimizer was; after each, the number of steps so far and the rates."""

    scheduler: weakref.ref[Any]
    optimizer: weakref.ref[Any]
    calls: list[tuple[int, _Rates]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Stepped:
    """An optimizer that steps: at each of its last steps, the number of it and the rates."""

    optimizer: weakref.ref[Any]
    steps: list[tuple[int, _Rates]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Taken:
    """A tensor of a state dict, whose writes torch counts, as of the parameter that it is.

    Attributes:
        steps: how many steps optimizers had made when it was taken.
        before: how often it had been written then.
        after: the same when the last step of an optimizer since then ended; None before there is one.
    """

    tensor: weakref.ref[torch.Tensor]
    steps: int
    before: int
    after: int | None = None


@dataclasses.dataclass
class _Paced:
    """A scheduler.

    Attributes:
        is_of_wrapper: whether a wrapper has stepped it that does so once for each rank.
        now: how often it was stepped since its optimizer was.
        calls: how often between each two of the last steps of that.
    """

    scheduler: weakref.ref[Any]
    optimizer: weakref.ref[Any]
    is_of_wrapper: bool
    now: int = 0
    calls: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Given:
    """An optimizer, and the learning rates that its groups had when they were made, or when watching began."""

    optimizer: weakref.ref[Any]
    rates: list[float]


class Acts(contextlib.AbstractContextManager["Acts"]):
    """Notes such calls of this process while it is entered."""

    def __init__(self) -> None:
        self._steps = 0
        self._divided: dict[int, _Divided] = {}
        self._again: list[tuple[str, list[torch.Tensor]]] = []
        self._scheduled: dict[int, _Scheduled] = {}
        self._stepped: dict[int, _Stepped] = {}
        self._taken: dict[int, _Taken] = {}
        self._restored: list[tuple[str, int]] = []
        self._paced: dict[int, _Paced] = {}
        self._given: dict[int, _Given] = {}
        self._loads = 0
        self._states = Loads()
        self._passes = Passes()
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Acts:
        for one in optimizers_of_process():
            for group in getattr(one, "param_groups", ()):
                self.on_group(one, group)
        self._patches.enter_context(calls.witnessed(self))
        self._patches.callback(STEPS.add(self._before_step, self._after_step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        for some in (self._divided, self._scheduled, self._stepped, self._taken, self._paced, self._given):
            some.clear()
        self._again, self._restored = [], []
        self._states.clear()

    def take(self) -> ActRecord:
        """Return what was noted since the last call."""
        divided = [kind for kind, left in self._again if any(host_rows(left))]
        found = ActRecord(
            divided, list(self._idle()), self._restored, list(self._paces()), list(self._levelled()), self._loads,
            *self._states.take(), self._passes.take(),
        )  # fmt: skip
        self._again, self._restored, self._loads = [], [], 0
        return found

    @quiet
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._states.before_step()
        self._passes.before_step(optimizer)

    @quiet
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        self._passes.after_step()
        self._states.after_step(optimizer)
        self._divided.pop(id(optimizer), None)
        self._scheduled.pop(id(optimizer), None)
        for taken in self._taken.values():
            taken.after = taken.before if (tensor := taken.tensor()) is None else writes(tensor)
        for paced in self._paced.values():
            if paced.optimizer() is optimizer:
                paced.calls, paced.now = [*paced.calls[1 - _MOST_STEPS :], paced.now], 0
        seen = self._stepped.get(id(optimizer))
        if seen is None or seen.optimizer() is not optimizer:
            seen = self._stepped[id(optimizer)] = _Stepped(weakref.ref(optimizer))
        if (rates := _rates(optimizer)) is not None:
            seen.steps = [*seen.steps[1 - _MOST_STEPS :], (self._steps, rates)]

    # Loss scalers ---------------------------------------------------------------------------

    @quiet
    def on_backward(self, tensors: Any) -> None:
        """Note which gradients that were divided are still there."""
        for one in self._divided.values():
            optimizer = one.optimizer()
            gradients = [] if optimizer is None else [p.grad for p in parameters_in(optimizer) if p.grad is not None]
            one.left = [(weakref.ref(each), strided(local_of(each)).any()) for each in gradients]
        self._passes.begin(tensors)

    @quiet
    def on_gradients(self) -> None:
        """Note that a backward pass has ended."""
        self._passes.end()

    @quiet
    def on_zero_grad(self) -> None:
        """Note that gradients are zeroed."""
        self._passes.drop()

    @quiet
    def on_clip(self) -> None:
        """Note that gradients are clipped."""
        self._passes.before_clip()

    @quiet
    def on_clipped(self) -> None:
        """Note that they were."""
        self._passes.after_clip()

    @quiet
    def on_unscaling(self, scaler: Any, optimizer: Any) -> None:
        """Note whether gradients are divided that were divided before, and were there when a backward added to them."""
        before = self._divided.get(id(optimizer))
        if before is not None and before.optimizer() is optimizer:
            # An object of its own is another gradient, which user code has put in its place.
            now = {id(p.grad) for p in parameters_in(optimizer) if p.grad is not None}
            left = [flag for ref, flag in before.left if (one := ref()) is not None and id(one) in now]
            if left and float(scaler.get_scale()) != 1.0:
                self._again.append((type(optimizer).__name__, left))
        self._divided[id(optimizer)] = _Divided(weakref.ref(optimizer))

    # Schedulers -----------------------------------------------------------------------------

    @quiet
    def on_schedule(self, scheduler: Any) -> None:
        """Note the learning rates of its optimizer."""
        optimizer = scheduler.optimizer
        seen = self._scheduled.get(id(optimizer))
        if seen is None or seen.optimizer() is not optimizer:
            seen = self._scheduled[id(optimizer)] = _Scheduled(weakref.ref(scheduler), weakref.ref(optimizer))
        if (rates := _rates(optimizer)) is not None:
            seen.calls = [*seen.calls[:1], *seen.calls[1:][-_MOST_STEPS:], (self._steps, rates)]
        paced = self._paced.get(id(scheduler))
        if paced is None or paced.scheduler() is not scheduler:
            paced = self._paced[id(scheduler)] = _Paced(
                weakref.ref(scheduler), weakref.ref(optimizer), _is_called_by(_OF_RANKS)
            )
        paced.now += 1

    def _paces(self) -> Iterator[Pace]:
        """Yield schedulers that are stepped equally often, and more than once, for each step of their optimizers."""
        for one in self._paced.values():
            scheduler, optimizer = one.scheduler(), one.optimizer()
            calls = one.calls[1:]  # before the first step there may be others
            is_steady = len(calls) > 1 and len(set(calls)) == 1 and calls[0] > 1
            if is_steady and not one.is_of_wrapper and scheduler is not None and optimizer is not None:
                yield Pace(type(scheduler).__name__, type(optimizer).__name__, calls[0], len(calls))

    # Learning rates -------------------------------------------------------------------------

    @quiet
    def on_group(self, optimizer: Any, group: Mapping[str, Any]) -> None:
        """Note the learning rate of a group that an optimizer is given."""
        seen = self._given.get(id(optimizer))
        if seen is None or seen.optimizer() is not optimizer:
            seen = self._given[id(optimizer)] = _Given(weakref.ref(optimizer), [])
        if isinstance(rate := group.get("lr"), (int, float)):
            seen.rates.append(float(rate))

    def _levelled(self) -> Iterator[Levelled]:
        """Yield optimizers of groups with different rates that have stepped by one, which is no floor of them."""
        for one in self._given.values():
            optimizer = one.optimizer()
            stepped = self._stepped.get(id(optimizer))
            if optimizer is None or stepped is None or stepped.optimizer() is not optimizer or not stepped.steps:
                continue
            rates = stepped.steps[-1][1]
            are_all = len(rates) == len(one.rates) == len(getattr(optimizer, "param_groups", ()))
            if are_all and len(set(one.rates)) > 1 and len(set(rates)) == 1 and rates[0] > min(one.rates):
                yield Levelled(type(optimizer).__name__, tuple(one.rates), rates[0])

    # Schedulers of optimizers that do not step ----------------------------------------------

    def _idle(self) -> Iterator[Idle]:
        """Yield schedulers whose optimizer does not step, where another one steps its parameters by constant rates."""
        for one, other in list(self._pairs()):
            is_dropped = _is_dropped(one.optimizer)
            scheduler, optimizer, stepping = one.scheduler(), one.optimizer(), other.optimizer()
            if _has_all(stepping, optimizer) or (is_dropped and _has_replaced(stepping, optimizer)):
                kind, own, stepping_kind = (type(each).__name__ for each in (scheduler, optimizer, stepping))
                ends = one.calls[0][1][0], one.calls[-1][1][0]
                yield Idle(kind, own, stepping_kind, len(one.calls), ends, other.steps[-1][1][0], is_dropped)

    def _pairs(self) -> Iterator[tuple[_Scheduled, _Stepped]]:
        """Yield what a scheduler does to an optimizer that does not step, with another that steps by constant rates.

        Rates that follow those of the idle one, as those of a wrapper's inner optimizer, are no constants.
        """
        for one in list(self._scheduled.values()):
            is_moved = one.calls[0][1] != one.calls[-1][1] and len({steps for steps, _ in one.calls}) > 1
            if not is_moved or one.scheduler() is None or one.optimizer() is None:
                continue
            for other in list(self._stepped.values()):
                # The step before the first call, which that call was to follow, and those after it.
                rates = [rates for steps, rates in other.steps if steps >= one.calls[0][0]]
                is_constant = len(rates) > 1 and len(set(rates)) == 1
                if is_constant and _are_of_torch(one.optimizer(), other.optimizer()) and not _is_scheduled(other):
                    yield one, other

    # State dicts ----------------------------------------------------------------------------

    @quiet
    def on_state_dict(self, state: Any) -> None:
        """Note which tensors it has; nothing is kept of those that user code keeps no longer."""
        values = state.values() if isinstance(state, Mapping) else ()
        for tensor in values:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                ref = weakref.ref(tensor, functools.partial(self._forget, id(tensor)))
                self._taken[id(tensor)] = _Taken(ref, self._steps, writes(tensor))

    def _forget(self, key: int, ref: weakref.ref[torch.Tensor]) -> None:
        if (taken := self._taken.get(key)) is not None and taken.tensor is ref:
            del self._taken[key]

    @quiet
    def on_load(self, module: nn.Module, state: Any) -> None:
        """Note where a module is given the tensors that it has, and nothing but optimizers has written them."""
        self._loads += 1
        self._states.before(module)
        tensors = _own_tensors(module, state)
        taken = [(one, self._taken[id(one)]) for one in tensors if id(one) in self._taken]
        if taken and len(taken) == len(tensors) and all(one.after is not None for _, one in taken):
            is_by_steps = all(one.after == writes(tensor) for tensor, one in taken)
            if is_by_steps and any(one.before != one.after for _, one in taken):
                steps = self._steps - max(one.steps for _, one in taken)
                self._restored.append((type(module).__name__, steps))

    @quiet
    def on_loaded(self, module: nn.Module, state: Any, result: Any) -> None:
        """Note what a module has loaded."""
        self._states.after(module, state, result)


def _is_called_by(packages: tuple[str, ...]) -> bool:
    """Whether a module of one of these packages has made the call of torch that is noted."""
    frame: types.FrameType | None = sys._getframe()
    own = (__name__, calls.__name__, "torch.")
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(own):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith(packages)


def _rates(optimizer: Any) -> _Rates | None:
    """Return the learning rates of an optimizer; None without one, or of tensors, which would have to be waited for."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return tuple(map(float, rates)) if rates and all(isinstance(one, (int, float)) for one in rates) else None


def _are_of_torch(*optimizers: Any) -> bool:
    """Whether optimizers are torch's own, which take their rates from their groups."""
    return all(type(one).__module__.startswith("torch.optim.") for one in optimizers)


def _has_all(stepping: Any, optimizer: Any) -> bool:
    """Whether one has all parameters of the other."""
    held = {id(one) for one in parameters_in(stepping)}
    return all(id(one) in held for one in parameters_in(optimizer))


def _has_replaced(stepping: Any, optimizer: Any) -> bool:
    """Whether one has parameters of the shapes of the other's, which no module has, as after it was sharded."""
    one, other = (sorted(tuple(each.shape) for each in parameters_in(it)) for it in (stepping, optimizer))
    if len(one) < 2 or one != other:
        return False
    mine = {id(each) for each in parameters_in(optimizer)}
    modules = objects_of(nn.Module)
    return not any(id(each) in mine for module in modules for each in vars(module).get("_parameters", {}).values())


def _is_scheduled(one: _Stepped) -> bool:
    """Whether a scheduler of the process has an optimizer."""
    return any(each.optimizer is one.optimizer() for each in objects_of(LRScheduler))


def _is_dropped(ref: weakref.ref[Any]) -> bool:
    """Whether nothing but schedulers refers to an optimizer, so that user code cannot step it.

    Variables of functions that run are no referrers that are known, but count.
    """
    referrers = gc.get_referrers(ref())
    count = sys.getrefcount(ref()) - 1  # that of the argument
    of_schedulers = {id(each) for one in objects_of(LRScheduler) for each in (one, one.__dict__)}
    is_mine = [
        id(one) in of_schedulers or (isinstance(one, types.MethodType) and one.__self__ is ref()) for one in referrers
    ]
    return all(is_mine) and count <= len(referrers)


def _own_tensors(module: nn.Module, state: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a state that are a module's own parameters; none if one of it is no tensor of its own."""
    own = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    given = {name: one for name, one in state.items() if name in own and isinstance(one, torch.Tensor)}
    if not all(_is_same(one, own[name]) for name, one in given.items()):
        return []
    return [one for name, one in given.items() if isinstance(own[name], nn.Parameter)]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    a, b = local_of(one), local_of(other)
    return a.numel() > 0 and a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
