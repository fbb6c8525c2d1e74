"""Remembers what happens to parameters from the construction of the model on: ties, replacements, shardings."""

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardproof.harness.watching.constants import Constant
from shardproof.harness.watching.names import modules_of
from shardproof.harness.watching.sharding import Sharding, Shardings

_Place = tuple[weakref.ref[nn.Module], str]
"""A module, and the name under which it has a parameter."""


@dataclasses.dataclass(frozen=True)
class Built:
    """Changes of parameters since the model was built, and constants that it has, by their canonical names.

    Attributes:
        thawed: those that require a gradient, and have replaced ones that did not.
        untied: the pairs that were one parameter until user code replaced one of the two, which may be meant.
        sharded: what each was when FSDP2 or FSDP1 sharded it.
        draws_alike: whether ranks may have drawn random numbers of DTensors alike; see :class:`sharding.Shardings`.
        constants: buffers and plain tensors that forwards read.
    """

    thawed: tuple[str, ...] = ()
    untied: tuple[tuple[str, ...], ...] = ()
    sharded: Mapping[str, Sharding] = dataclasses.field(default_factory=dict)
    draws_alike: bool = True
    constants: Mapping[str, Constant] = dataclasses.field(default_factory=dict)


class _Pair:
    """Two places in which one parameter was registered.

    Attributes:
        places: both, the later one last.
        replaced: those of them in which user code has registered another parameter since then.
    """

    def __init__(self, first: _Place, last: _Place) -> None:
        self.places = first, last
        self.replaced: set[int] = set()

    def replace(self, module: nn.Module, name: str) -> None:
        """Note that a module has another parameter under a name."""
        self.replaced |= {number for number, (ref, last) in enumerate(self.places) if last == name and ref() is module}


class Ties:
    """Notes each parameter that is registered twice, that replaces a frozen one, or that is sharded.

    :meth:`close` ends it.
    """

    def __init__(self) -> None:
        self._first: dict[int, tuple[weakref.ref[Any], weakref.ref[nn.Module], str]] = {}
        self._pairs: list[_Pair] = []
        #: The places of frozen parameters that were replaced by parameters that require a gradient.
        self._thawed: list[_Place] = []
        self._handle = register_module_parameter_registration_hook(self._on_registration)
        self._shardings = Shardings()

    def close(self) -> None:
        """Note no more."""
        self._handle.remove()
        self._shardings.close()

    def built(self, roots: Sequence[nn.Module]) -> Built:
        """Return what has happened to the parameters of these roots."""
        untied = tuple(self._names(roots, is_apart=True))
        return Built(self._thawed_in(roots), untied, self._shardings.of(roots), self._shardings.draws_alike)

    def names(self, roots: Sequence[nn.Module]) -> list[tuple[str, ...]]:
        """Return the canonical names of what was one parameter in these roots, and which nobody means to be two."""
        return list(self._names(roots, is_apart=False))

    def _names(self, roots: Sequence[nn.Module], *, is_apart: bool) -> Iterator[tuple[str, ...]]:
        names = _names_of(roots)
        for pair in self._pairs:
            places = tuple(filter(None, (_place(names, *one) for one in pair.places)))
            if (len(pair.replaced) == 1) == is_apart and len(places) == 2 and places[0] != places[1]:
                yield places

    def _thawed_in(self, roots: Sequence[nn.Module]) -> tuple[str, ...]:
        names = _names_of(roots)
        places = [_place(names, *one) for one in self._thawed if _requires_gradient(*one)]
        return tuple(dict.fromkeys(filter(None, places)))

    def _on_registration(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None:
            return
        before = module._parameters.get(name)
        if before is not None and before is not parameter and parameter.requires_grad and not before.requires_grad:
            self._thawed.append((weakref.ref(module), name))
        for pair in self._pairs if before is not parameter else ():
            pair.replace(module, name)
        known = self._first.get(id(parameter))
        if known is not None and known[0]() is parameter:
            owner = known[1]()
            if owner is not None and owner is not module and owner._parameters.get(known[2]) is parameter:
                self._pairs.append(_Pair((known[1], known[2]), (weakref.ref(module), name)))
                return
        self._first[id(parameter)] = (weakref.ref(parameter), weakref.ref(module), name)


def _names_of(roots: Sequence[nn.Module]) -> dict[int, str]:
    """Return the canonical names of the modules of roots, by id."""
    return {id(module): name for root in roots for name, module in modules_of(root)}


def _place(names: Mapping[int, str], ref: weakref.ref[nn.Module], last: str) -> str:
    """Return the canonical name of a parameter; empty if its module is not among those of ``names``."""
    owner = ref()
    if owner is None or id(owner) not in names:
        return ""
    return f"{names[id(owner)]}.{last}" if names[id(owner)] else last


def _requires_gradient(ref: weakref.ref[nn.Module], last: str) -> bool:
    """Whether the parameter that a module has now requires a gradient."""
    parameter = owner._parameters.get(last) if (owner := ref()) is not None else None
    return parameter is not None and parameter.requires_grad
