"""Sees calls of user code that concern the process: loss scalers, schedulers, and state dicts of modules."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shardproof.harness.tensors.fingerprints import bits_of_all, host_rows, strided
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching import calls
from shardproof.harness.watching.hooks import quiet
from shardproof.harness.watching.optimizers import STEPS, parameters_in
from shardproof.harness.watching.records import ActRecord, Idle

#: How many steps of an optimizer are remembered.
_MOST_STEPS = 16

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
    """A tensor of a state dict.

    Attributes:
        steps: how many steps optimizers had made when it was taken.
        before: its bits then; on its device.
        after: its bits when the last step of an optimizer since then ended; None before there is one.
    """

    tensor: weakref.ref[torch.Tensor]
    steps: int
    before: torch.Tensor
    after: torch.Tensor | None = None


class _Load(NamedTuple):
    """A module that was given its own tensors to load, with those of its parameters, and their bits by then."""

    kind: str
    steps: int
    taken: list[_Taken]
    now: list[torch.Tensor]

    @property
    def restores_nothing(self) -> bool:
        """Whether nothing but optimizers has written the tensors, which some of these have changed."""
        before, after = (host_rows([getattr(one, of) for one in self.taken]) for of in ("before", "after"))
        return before != after == host_rows(self.now)


class Acts(contextlib.AbstractContextManager["Acts"]):
    """Notes such calls of this process while it is entered."""

    def __init__(self) -> None:
        self._steps = 0
        self._divided: dict[int, _Divided] = {}
        self._again: list[tuple[str, list[torch.Tensor]]] = []
        self._scheduled: dict[int, _Scheduled] = {}
        self._stepped: dict[int, _Stepped] = {}
        self._taken: dict[int, _Taken] = {}
        self._loads: list[_Load] = []
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Acts:
        self._patches.enter_context(calls.witnessed(self))
        self._patches.callback(STEPS.add(lambda *_: None, self._after_step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        for one in (self._divided, self._again, self._scheduled, self._stepped, self._taken, self._loads):
            one.clear()

    def take(self) -> ActRecord:
        """Return what was noted since the last call."""
        divided = [kind for kind, left in self._again if any(host_rows(left))]
        restored = [(one.kind, one.steps) for one in self._loads if one.restores_nothing]
        self._again, self._loads = [], []
        return ActRecord(divided, list(self._idle()), restored)

    @quiet
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        self._divided.pop(id(optimizer), None)
        self._scheduled.pop(id(optimizer), None)
        taken = [(one, tensor) for one in self._taken.values() if (tensor := one.tensor()) is not None]
        for (one, _), bits in zip(taken, _bits([tensor for _, tensor in taken]), strict=True):
            one.after = bits
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
        tensors = [one for one in values if isinstance(one, torch.Tensor) and one.is_floating_point()]
        for tensor, bits in zip(tensors, _bits(tensors), strict=True):
            ref = weakref.ref(tensor, functools.partial(self._forget, id(tensor)))
            self._taken[id(tensor)] = _Taken(ref, self._steps, bits)

    def _forget(self, key: int, ref: weakref.ref[torch.Tensor]) -> None:
        if (taken := self._taken.get(key)) is not None and taken.tensor is ref:
            del self._taken[key]

    @quiet
    def on_load(self, module: nn.Module, state: Any) -> None:
        """Note where a module is given the tensors that it has, and nothing but optimizers has written them."""
        tensors = _own_tensors(module, state)
        taken = [self._taken[id(one)] for one in tensors if id(one) in self._taken]
        if taken and len(taken) == len(tensors) and all(one.after is not None for one in taken):
            steps = self._steps - max(one.steps for one in taken)
            # Of its own objects: the state may be taken again before the step has ended.
            seen = [copy.copy(one) for one in taken]
            self._loads.append(_Load(type(module).__name__, steps, seen, _bits(tensors)))


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
    modules = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
    return not any(id(each) in mine for module in modules for each in vars(module).get("_parameters", {}).values())


def _is_scheduled(one: _Stepped) -> bool:
    """Whether a scheduler of the process has an optimizer."""
    return any(each.optimizer is one.optimizer() for each in _schedulers())


def _schedulers() -> list[LRScheduler]:
    return [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]


def _is_dropped(ref: weakref.ref[Any]) -> bool:
    """Whether nothing but schedulers refers to an optimizer, so that user code cannot step it.

    Variables of functions that run are no referrers that are known, but count.
    """
    referrers = gc.get_referrers(ref())
    count = sys.getrefcount(ref()) - 1  # that of the argument
    of_schedulers = {id(each) for one in _schedulers() for each in (one, one.__dict__)}
    is_mine = [
        id(one) in of_schedulers or (isinstance(one, types.MethodType) and one.__self__ is ref()) for one in referrers
    ]
    return all(is_mine) and count <= len(referrers)


@torch.no_grad()
def _bits(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the bits of local tensors on their devices; of one that several are, they are computed once."""
    local = [local_of(one) for one in tensors]
    places = [(one.device, one.data_ptr(), tuple(one.shape)) for one in local]
    once = dict(zip(places, local, strict=True))
    bits = dict(zip(once, bits_of_all(list(once.values())), strict=True))
    return [bits[place] for place in places]


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
