"""The search for copies of a root: modules, lists and dicts of tensors with the shapes of its parameters.

A moving average, a teacher, a target network, a reference policy or a best state is one: no optimizer steps it. The
search is a walk over the objects of the process, and keeps none of them alive.
"""

from __future__ import annotations

import collections
import gc
import re
import types
import weakref
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching.names import kind_of, modules_of, parameters_of, unwrapped, without_wrappers
from shardproof.harness.watching.optimizers import parameters_of_optimizers

#: How many followers of one root are looked at, and how many places in the root are tried for each.
MOST, _PLACES = 8, 16

#: A list or dict with more entries than so many times those of the root is something else.
_LARGEST = 4

#: The kinds of containers whose tensors may be a copy of those of a root.
_LISTS, _DICTS = (list, tuple), (dict, collections.OrderedDict)

_NOT_IN_NAMES = re.compile(r"[^0-9A-Za-z]")


class Matched(NamedTuple):
    """A tensor of a follower and the parameter of the root whose name or place it has; both by weak reference."""

    own: weakref.ref[torch.Tensor]
    parameter: weakref.ref[torch.Tensor]


class LikePart(NamedTuple):
    """Something with the names or the shapes of parameters of a root.

    Attributes:
        kind: its class.
        owner: it, by weak reference if that is possible; a list or a dict has none.
        place: the name of the part of the root that it is like; empty for the root.
        pairs: its tensors with the root's parameters.
        key: the id of the container, by which it is known again.
        name: how user code names it, if that is known.
    """

    kind: str
    owner: weakref.ref[nn.Module] | None
    place: str
    pairs: list[Matched]
    key: int
    name: str = ""


class _Part(NamedTuple):
    """A module of the root with its parameters, by name within it."""

    place: str
    parameters: dict[str, nn.Parameter]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of all of them, in order."""
        return tuple(tuple(local_of(one).shape) for one in self.parameters.values())

    @property
    def full_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The full shapes of all of them, in order, where ranks have parts of some."""
        return tuple(tuple(one.shape) for one in self.parameters.values())

    @property
    def trains(self) -> bool:
        """Whether one of them requires a gradient."""
        return any(one.requires_grad for one in self.parameters.values())

    @property
    def has_elements(self) -> bool:
        """Whether this rank has any of them."""
        return any(local_of(one).numel() for one in self.parameters.values())

    def only_trained(self) -> _Part:
        """Return it without the parameters that require no gradient."""
        return _Part(self.place, {name: one for name, one in self.parameters.items() if one.requires_grad})


class FollowerSearch:
    """Looks for the followers of one root.

    Args:
        roots: the modules that are watched as one root.
        stepped: what optimizers have stepped, also those that are gone, as for a learner of each task.
    """

    def __init__(self, roots: Sequence[nn.Module], stepped: Container[torch.Tensor] = ()) -> None:
        self._stepped = stepped
        self._parts = [one for root in roots for one in _parts_of(root) if one.trains and one.has_elements]
        self._mine = {id(one) for root in roots for _, one in parameters_of(root)}
        self._trained = {id(one) for part in self._parts for one in part.parameters.values() if one.requires_grad}
        held = (local_of(one) for part in self._parts for one in part.parameters.values())
        self._places = {one.data_ptr() for one in held if one.numel()}
        self._most = _LARGEST * max((len(one.parameters) for one in self._parts), default=0) + _LARGEST
        self._by_shapes = _by_shapes(self._parts)
        self._held: Mapping[int, str] = {}

    def find(self, known: Collection[int]) -> list[list[LikePart]]:
        """Return what is found, each with all places of the root that it may be like; ``known`` are keys of others."""
        if not self._parts:
            return []
        self._held = parameters_of_optimizers()
        found: list[list[LikePart]] = []
        modules: list[nn.Module] = []
        for one in gc.get_objects():
            kind = type(one)
            if id(one) in known:
                continue
            if issubclass(kind, nn.Module):
                modules.append(one)
            elif kind in _LISTS and 1 < len(one) <= self._most:
                found.append(self._of_list(one))
            elif kind in _DICTS and 1 < len(one) <= self._most:
                found.append(self._of_dict(one))
        every = [*self._of_modules(modules), *(one for one in found if one)][:MOST]
        names = names_of([places[0].key for places in every]) if every else {}
        return [[one._replace(name=names.get(one.key, "")) for one in places] for places in every]

    def _of_modules(self, modules: Sequence[nn.Module]) -> Iterator[list[LikePart]]:
        """Yield those of modules, but of such as are inside of another one that is."""
        every = {id(one): places for one in modules if (places := self._of_module(one))}
        inside = {id(child) for one in modules if id(one) in every for child in _children_of(one)}
        for key, places in every.items():
            if key not in inside:
                yield places

    def _of_module(self, module: nn.Module) -> list[LikePart]:
        if "_parameters" not in vars(module) or "_modules" not in vars(module):  # one that is being made
            return []
        own = dict(parameters_of(module))
        if not own or len(own) > self._most or any(not self._is_beside(one) for one in own.values()):
            return []
        shapes = tuple(tuple(local_of(one).shape) for one in own.values())
        found = []
        for part in self._by_shapes.get(shapes, ())[:_PLACES]:
            is_other = all(one is not mine for one, mine in zip(own.values(), part.parameters.values(), strict=True))
            if is_other and part.trains and list(part.parameters) == list(own):
                pairs, kind = _paired(own.values(), part.parameters.values()), kind_of(unwrapped(module)).__name__
                found.append(LikePart(kind, weakref.ref(module), part.place, pairs, id(module)))
        return found

    def _of_list(self, values: Sequence[Any]) -> list[LikePart]:
        first = values[0]
        if not issubclass(type(first), torch.Tensor) or not all(self._is_copy(one) for one in values):
            return []
        shapes = tuple(tuple(local_of(one).shape) for one in values)
        return [
            LikePart(type(values).__name__, None, part.place, _paired(values, part.parameters.values()), id(values))
            for part in self._by_shapes.get(shapes, ())[:_PLACES]
        ]

    def _of_dict(self, values: Mapping[Any, Any]) -> list[LikePart]:
        try:
            key, first = next(iter(values.items()))
            if not issubclass(type(first), torch.Tensor) or issubclass(type(first), nn.Parameter):
                return []
            named = _named(values, key, self._trained)
        except RuntimeError:  # another thread changes it
            return []
        found = []
        for part in self._parts:
            mine = _of_names(named, part.only_trained())
            if mine and all(self._is_copy(one) and _are_alike(one, like) for one, like in mine):
                found.append(LikePart("dict", None, part.place, _paired(*zip(*mine, strict=True)), id(values)))
                break  # the outermost
        return found

    def _is_beside(self, tensor: torch.Tensor) -> bool:
        """Whether nothing steps a parameter of a module: one of the root's may stand there without a gradient."""
        if id(tensor) in self._mine:
            return not tensor.requires_grad
        return id(tensor) not in self._held and tensor not in self._stepped and _is_readable(tensor)

    def _is_copy(self, tensor: Any) -> bool:
        """Whether a value is a tensor of its own, with elements of its own, and computed by no graph."""
        if not issubclass(type(tensor), torch.Tensor) or id(tensor) in self._mine or id(tensor) in self._held:
            return False
        if tensor in self._stepped:
            return False
        return _is_readable(tensor) and tensor.is_leaf and local_of(tensor).data_ptr() not in self._places


def _parts_of(root: nn.Module) -> Iterator[_Part]:
    """Yield the root and its modules, the outer ones first; of wrappers the module that they wrap."""
    every = list(parameters_of(root))
    seen: set[str] = set()
    for place, _ in modules_of(root):
        if place in seen:
            continue
        seen.add(place)
        begin = f"{place}." if place else ""
        mine = {name.removeprefix(begin): one for name, one in every if name.startswith(begin)}
        if mine:
            yield _Part(place, mine)


def _by_shapes(parts: Sequence[_Part]) -> dict[Any, list[_Part]]:
    """Sort parts by the shapes of all their parameters, and of those that train."""
    found: dict[Any, list[_Part]] = {}
    for part in parts:
        for one in (part, part.only_trained()):
            for shapes in (one.shapes, one.full_shapes):
                same = found.setdefault(shapes, [])
                if all(each.place != one.place for each in same):
                    same.append(one)
    return found


def _children_of(module: nn.Module) -> Iterator[nn.Module]:
    return (one for one in module.modules() if one is not module)


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain or distributed one, of floating point, that has memory, or an empty shard."""
    if type(tensor).__name__ not in ("Tensor", "Parameter", "Buffer", "DTensor") or not tensor.is_floating_point():
        return False
    own = local_of(tensor.detach())
    is_plain = type(own) in (torch.Tensor, nn.Parameter) and own.layout == torch.strided and own.device.type != "meta"
    return is_plain and own.untyped_storage().nbytes() >= own.numel() * own.element_size()


def _named(values: Mapping[Any, Any], key: Any, trained: Collection[int]) -> dict[Any, Any]:
    """Return the values of a dict by the ids of parameters that are its keys, or by names without signs."""
    if isinstance(key, str):
        return {_plain(without_wrappers(name)): one for name, one in values.items() if isinstance(name, str)}
    if isinstance(key, torch.Tensor):
        return {id(one): value for one, value in values.items()}
    return dict(values) if key in trained else {}


def _of_names(named: Mapping[Any, Any], part: _Part) -> list[tuple[Any, nn.Parameter]]:
    """Return the values of a dict with the parameters of a part that are its keys; nothing if one is none."""
    names = [_plain(name) for name in part.parameters]
    if len(set(names)) < len(names) or not named or len(names) < 2:
        return []
    found = []
    for name, one in zip(names, part.parameters.values(), strict=True):
        value = named.get(name, named.get(id(one)))
        if value is None:
            return []
        found.append((value, one))
    return found


def _plain(name: str) -> str:
    return _NOT_IN_NAMES.sub("", name)


def _are_alike(one: Any, other: torch.Tensor) -> bool:
    return local_of(one).shape in (local_of(other).shape, other.shape)


def _paired(own: Any, parameters: Any) -> list[Matched]:
    return [Matched(weakref.ref(one), weakref.ref(other)) for one, other in zip(own, parameters, strict=True)]


def names_of(keys: Collection[int]) -> dict[int, str]:
    """Return how user code names containers: "Ema.shadow" for an attribute, "teacher" for a variable of a script.

    A variable of a function has no name here: asking its frame would keep values alive.

    Args:
        keys: their ids.
    """
    every = [one for one in gc.get_objects() if id(one) in keys]
    found: dict[int, str] = {}
    for holder in gc.get_referrers(*every):
        values = holder if type(holder) is dict else getattr(holder, "__dict__", None)
        if holder is every or type(values) is not dict:
            continue
        kind = "" if values is holder or isinstance(holder, types.ModuleType) else f"{type(holder).__name__}."
        for name, value in list(values.items()):
            if id(value) in keys and isinstance(name, str) and name.isidentifier():
                found.setdefault(id(value), f"{kind}{name}")
    return found
