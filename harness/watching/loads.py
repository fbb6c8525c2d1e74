"""Sees loads of state dicts that load nothing into what trains, and loads that the next step of an optimizer undoes."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardproof.harness.judging import numerics
from shardproof.harness.tensors.fingerprints import host_rows
from shardproof.harness.watching.names import without_wrappers
from shardproof.harness.watching.optimizers import parameters_in
from shardproof.harness.watching.records import Missed, Undone
from shardproof.harness.watching.samples import some_of

#: How many loads are remembered until an optimizer steps, of how many parameters, and of how many elements of each.
_MOST_LOADS, _MOST_PARAMETERS, _MOST_ELEMENTS = 32, 16, 256

#: The fewest keys that a prefix explains, where there are more.
_FEWEST_KEYS = 2

#: How many steps after a load may undo it.
_MOST_STEPS = 4


@dataclasses.dataclass
class _Pending:
    """A load of which keys have no place in the module, which may train or not."""

    module: weakref.ref[nn.Module]
    found: Missed


@dataclasses.dataclass
class _Loaded:
    """Samples of parameters that a load has changed.

    Attributes:
        names: of the parameters.
        before, after: samples before the load and after it.
        steps: how many steps of optimizers have begun since.
        is_there: whether the values are the loaded ones when the first of them begins; on its device.
        is_back: at each later step, whether the values are those before the load; on its device.
        is_owned: whether an optimizer that has stepped since has one of the parameters.
    """

    kind: str
    names: list[str]
    parameters: list[weakref.ref[nn.Parameter]]
    before: list[torch.Tensor]
    after: list[torch.Tensor] = dataclasses.field(default_factory=list)
    steps: int = 0
    is_there: torch.Tensor | None = None
    is_back: list[torch.Tensor] = dataclasses.field(default_factory=list)
    is_owned: bool = False

    def now(self) -> list[torch.Tensor] | None:
        """Return samples of the parameters as they are; None if one is gone, or another one."""
        alive = [one() for one in self.parameters]
        samples = [None if one is None else _sample(one) for one in alive]
        found = [one for one in samples if one is not None]
        if [one.shape for one in found] != [one.shape for one in self.before]:
            return None
        return found


class Loads:
    """Loads of state dicts by modules, between the steps of optimizers."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._loaded: list[_Loaded] = []
        self._missed: list[Missed] = []

    def clear(self) -> None:
        """Forget everything."""
        self._pending, self._loaded, self._missed = [], [], []

    def take(self) -> tuple[list[Missed], list[Undone]]:
        """Return what was found since the last call."""
        for one in self._loaded:
            if one.steps == 1:  # what writes parameters after a step may be the last to do so
                self._look(one)
        missed, self._missed = self._missed, []
        undone = [(one, one.is_there) for one in self._loaded if one.is_there is not None and one.is_back]
        found = []
        for one, is_there in undone:
            there, *back = host_rows([is_there, *one.is_back])
            if there and any(back):
                found.append(Undone(one.kind, tuple(one.names), back.index(True) + 1, one.is_owned))
            if any(back) or not there:
                self._loaded.remove(one)
        return missed, found

    # A load ---------------------------------------------------------------------------------

    @torch.no_grad()
    def before(self, module: nn.Module) -> None:
        """Take samples of parameters that are about to be loaded."""
        trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        some = trained[:: max(1, -(-len(trained) // _MOST_PARAMETERS))]
        samples = [(name, one, own.clone()) for name, one in some if (own := _sample(one)) is not None]
        held = {id(one) for _, one, _ in samples}
        # A later load of the same parameters counts alone.
        self._loaded = [one for one in self._loaded if not any(id(ref()) in held for ref in one.parameters)]
        if samples:
            names, parameters, values = zip(*samples, strict=True)
            new = _Loaded(type(module).__name__, list(names), [weakref.ref(one) for one in parameters], list(values))
            self._loaded = [*self._loaded[1 - _MOST_LOADS :], new]

    @torch.no_grad()
    def after(self, module: nn.Module, state: Any, result: Any) -> None:
        """Note which keys of a state have no place in a module, and the values of parameters that are loaded."""
        for one in self._loaded:
            if not one.after and any(ref() is each for ref in one.parameters for each in module.parameters()):
                one.after = [each.clone() for each in one.now() or []]
        self._loaded = [one for one in self._loaded if one.after]
        if isinstance(state, Mapping):
            self._note_keys(module, state, result)

    def _note_keys(self, module: nn.Module, state: Mapping[str, Any], result: Any) -> None:
        unexpected = list(dict.fromkeys(getattr(result, "unexpected_keys", None) or ()))
        matched = len(state) - len(unexpected)
        if matched > 0 or not state:
            self._pending = [one for one in self._pending if not _are_one(one.module(), module)]
        if not unexpected:
            return
        shapes = {name: one.shape for name, one in _own_of(module)}
        missing = set(getattr(result, "missing_keys", None) or ())
        best = _explained({key: state.get(key) for key in unexpected}, shapes, missing)
        if matched > 0 and best is None:
            return
        own = next(iter(shapes), "")
        count, key, name = best if best is not None else (0, unexpected[0], own)
        if shapes:
            new = Missed(type(module).__name__, len(state), max(0, matched), count, key, name)
            self._pending = [*self._pending[1 - _MOST_LOADS :], _Pending(weakref.ref(module), new)]

    # A step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self) -> None:
        """Compare parameters with what was loaded, and with what was there before."""
        for one in self._loaded:
            one.steps += 1
            if one.steps > 1:
                self._look(one)
            elif (now := one.now()) is not None:
                change = _distance(one.after, one.before)
                is_much = change > numerics.LOAD_CHANGES * _distance(one.before)
                one.is_there = is_much & (_distance(now, one.after) <= numerics.LOAD_IS_THERE * change)
        self._loaded = [one for one in self._loaded if one.steps <= _MOST_STEPS or one.is_back]

    def after_step(self, optimizer: Any) -> None:
        """Note loads of what an optimizer has stepped."""
        if not self._pending and not self._loaded:
            return
        stepped = {id(one) for one in parameters_in(optimizer)}
        for one in self._loaded:
            one.is_owned |= any(id(ref()) in stepped for ref in one.parameters)
        for pending in list(self._pending):
            module = pending.module()
            if module is None:
                self._pending.remove(pending)
            elif any(id(one) in stepped for one in module.parameters()):
                self._pending.remove(pending)
                self._missed.append(pending.found)

    @torch.no_grad()
    def _look(self, one: _Loaded) -> None:
        if one.is_there is not None and len(one.is_back) < _MOST_STEPS and (now := one.now()) is not None:
            one.is_back.append(_distance(now, one.before) <= numerics.LOAD_IS_UNDONE * _distance(one.after, one.before))


def _sample(parameter: nn.Parameter) -> torch.Tensor | None:
    own = some_of(parameter)
    if own is None or not own.is_floating_point():
        return None
    return own[:: max(1, own.numel() // _MOST_ELEMENTS)]


def _distance(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
    """Return how far samples are from others, or how large they are."""
    device = some[0].device
    rows = zip(some, others, strict=True) if others is not None else ((one, torch.zeros_like(one)) for one in some)
    squares = [(one.double() - other.double()).square().sum().to(device) for one, other in rows]
    return torch.stack(squares).sum().sqrt()


def _own_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _are_one(one: nn.Module | None, other: nn.Module) -> bool:
    """Whether one module is the other, or is in it."""
    return one is not None and (
        any(each is one for each in other.modules()) or any(each is other for each in one.modules())
    )


def _explained(
    given: Mapping[str, Any], shapes: Mapping[str, torch.Size], missing: set[str]
) -> tuple[int, str, str] | None:
    """Return how many keys are names that are missing, but for a prefix, with one of each; None without any.

    Args:
        given: what a state has under keys that are no names of the module.
        shapes: those of what the module has.
        missing: names that the state lacks.
    """
    pairs = [*_pairs(given, missing)]
    for key, value in given.items():
        if isinstance(value, Mapping):  # a state within a checkpoint
            pairs += [
                (key, f"{key!r} of the checkpoint", name, each) for name, each in value.items() if name in missing
            ]
    fits = [
        (prefix, key, name)
        for prefix, key, name, value in pairs
        if isinstance(value, torch.Tensor) and value.shape == shapes.get(name)
    ]
    if not fits:
        return None
    (best, count), *_ = collections.Counter(prefix for prefix, _, _ in fits).most_common(1)
    if count < min(_FEWEST_KEYS, len(given), len(missing)):
        return None
    return next((count, key, name) for prefix, key, name in fits if prefix == best)


def _pairs(given: Mapping[str, Any], missing: set[str]) -> Iterator[tuple[str, str, str, Any]]:
    """Yield prefixes, keys, names and values, where the key is the name but for the prefix and parts of wrappers."""
    by_plain = {without_wrappers(name): name for name in missing}
    by_suffix: dict[str, list[tuple[str, str]]] = {}
    for plain, name in by_plain.items():
        for suffix, prefix in _suffixes(plain):
            by_suffix.setdefault(suffix, []).append((prefix, name))
    for key, value in given.items():
        plain = without_wrappers(key)
        for suffix, prefix in ((plain, ""), *_suffixes(plain)):
            if suffix in by_plain:
                yield f"{prefix}+", key, by_plain[suffix], value
        for prefix, name in by_suffix.get(plain, ()):
            yield f"-{prefix}", key, name, value


def _suffixes(name: str) -> Iterator[tuple[str, str]]:
    """Yield what follows a prefix, and the prefix, of at least two parts as a tensor's name within a module has."""
    parts = name.split(".")
    for cut in range(1, len(parts)):
        yield ".".join(parts[cut:]), ".".join(parts[:cut])
