"""Checks what an adapter class declares, before any rank starts.

A class comes from a user, and everything about it may be wrong: whatever it raises or returns becomes one line that
names the implementation, the member, the value and what would be right.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from shardproof import renamed
from shardproof.harness.adapters.base import Adapter, Traits, is_undefined, members_of_capabilities, undefined
from shardproof.harness.adapters.capability import EVERY, Capability
from shardproof.harness.adapters.fsdp1 import Fsdp1Methods
from shardproof.harness.adapters.registry import is_control, line_of, line_of_error, one_line
from shardproof.harness.adapters.replicas import ReplicatedAdapter

_T = TypeVar("_T")

#: The most elements by which a unit is padded on a rank: no library aligns to more than a page of memory, which has
#: this many elements of one byte.
_MOST_PADDING = 4096

#: A parameter whose padding is negligible, and numbers of ranks that divide it.
_LARGE, _SIZES = torch.Size([1024, 1024]), (2, 4, 8)


def check(implementation: str, adapter: type[Adapter], device: str) -> None:
    """Check everything that an adapter class declares, and that it is available.

    Raises:
        ValueError: a member is missing or wrong, or the implementation cannot run on this host. The message is one
            line.
    """
    asked = _Asked(implementation)
    name = asked.read("name", lambda: getattr(adapter, "name", None))
    if not isinstance(name, str) or not name.strip():
        raise asked.wrong("name", name, "a string by which ranks tell adapters apart")
    for kind, member in _methods(adapter):
        asked.read(member, functools.partial(_check_signature, asked, adapter, kind, member))
    # First: what is not installed may be missing in the other answers too.
    reason = asked.read("availability()", lambda: adapter.availability(device))
    if reason is not None and not (isinstance(reason, str) and reason.strip()):
        raise asked.wrong("availability()", reason, "None, or one line that says why it cannot run")
    if reason:
        raise ValueError(f"implementation {implementation!r} cannot run here on {device}: {one_line(reason)}")
    traits = asked.read("traits", lambda: adapter.traits)
    if not isinstance(traits, Traits):
        raise asked.wrong("traits", traits, "an instance of shardproof.harness.adapters.base.Traits")
    capabilities = asked.read("capabilities()", adapter.capabilities)
    if not isinstance(capabilities, (set, frozenset)) or not capabilities <= EVERY:
        raise asked.wrong(
            "capabilities()", capabilities, "a frozenset of members of Capability and names of capability.OPTIONS"
        )
    _check_names(implementation, adapter)
    for member, capability in members_of_capabilities(Fsdp1Methods).items():
        if capability in capabilities and is_undefined(adapter, member):
            raise _WrongMember(f"implementation {implementation!r} {undefined(capability, member)}")
    version = asked.read("version()", adapter.version)
    if not isinstance(version, str):
        raise asked.wrong("version()", version, "a string")
    source = asked.read("source()", adapter.source)
    if source is not None and not isinstance(source, str):
        raise asked.wrong("source()", source, "the name of a file, or None")
    _check_claims(asked, adapter, traits, frozenset(capabilities))


def _check_names(implementation: str, adapter: type[Adapter]) -> None:
    """Check that no method, and no option of ``option_names``, has the name of an older version."""
    methods = [old.partition(".")[2] for old in renamed.rows() if old.startswith("Adapter.")]
    lines = [
        f"{old} was renamed: it is {renamed.rows()[f'Adapter.{old}']}"
        for old in methods
        if hasattr(adapter, old.removesuffix("()"))
    ]
    lines += [
        f"option_names: {old!r} was renamed: it is {new!r}"
        for old in adapter.option_names
        if (new := renamed.option(old)) != old
    ]
    if lines:
        raise _WrongMember(f"implementation {implementation!r}: {lines[0]}")


class _Asked:
    """Reads members of an adapter class and makes errors about them."""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation

    def read(self, member: str, get: Callable[[], _T]) -> _T:
        """Return the result of ``get``; whatever it raises becomes a ValueError about ``member``."""
        try:
            return get()
        except _WrongMember:
            raise
        except BaseException as error:
            raise _WrongMember(
                f"implementation {self.implementation!r}: {member} raised {line_of_error(error)}"
            ) from None

    def wrong(self, member: str, value: object, expected: str) -> ValueError:
        """Return the error about a member with a wrong value."""
        return _WrongMember(
            f"implementation {self.implementation!r}: {member} is {line_of(value)}; expected {expected}"
        )


class _WrongMember(ValueError):
    """One line about one member."""


def _methods(adapter: type[Adapter]) -> Iterator[tuple[type, str]]:
    """Yield the methods of the protocol that an adapter class has, by the class that describes each."""
    for kind in (Adapter, Fsdp1Methods):
        for name, value in vars(kind).items() if issubclass(adapter, kind) else ():
            is_method = inspect.isfunction(value) or type(value) is classmethod
            if is_method and (name == "__init__" or not name.startswith("_")):
                yield kind, name


def _check_signature(asked: _Asked, adapter: type[Adapter], kind: type, member: str) -> None:
    """Check that a member is a method and takes the arguments that the harness passes."""
    found, base = getattr(adapter, member), inspect.signature(getattr(kind, member))
    # A class method is bound to its class, which is no argument then.
    names = [name for name, one in base.parameters.items() if one.kind == one.KEYWORD_ONLY]
    places = [None] * (sum(one.kind != one.VAR_KEYWORD for one in base.parameters.values()) - len(names))
    if not callable(found):
        raise asked.wrong(member, found, f"a method, {member}{_without_types(base)}")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return  # written in C
    try:
        signature.bind(*places, **dict.fromkeys(names))
    except TypeError as error:
        raise _WrongMember(
            f"implementation {asked.implementation!r}: {member}{_without_types(signature)} does not take the "
            f"arguments of {member}{_without_types(base)}: {error}"
        ) from None


def _without_types(signature: inspect.Signature) -> str:
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _check_claims(asked: _Asked, adapter: type[Adapter], traits: Traits, capabilities: frozenset[str]) -> None:
    """Check that what the adapter claims to shard is something, and that it can be told from an unsharded model."""
    if not traits.shards:
        # What shards nothing on purpose: the baselines and the other controls.
        if adapter is not ReplicatedAdapter and not is_control(adapter):
            raise asked.wrong(
                "traits.shards", sorted(traits.shards), "some of parameters, gradients, optimizer: an implementation "
                "that shards nothing is not tested",
            )  # fmt: skip
        return
    claims, declares = "parameters" in traits.shards, Capability.SHARDED in capabilities
    if claims != declares:
        raise asked.wrong(
            "traits.shards", sorted(traits.shards), "'parameters' among them exactly if capabilities() has "
            f"Capability.SHARDED, which is {'declared' if declares else 'missing'}",
        )  # fmt: skip
    if traits.collective_padding > _MOST_PADDING:
        raise asked.wrong("traits.collective_padding", traits.collective_padding, f"at most {_MOST_PADDING} elements")
    for size in _SIZES:
        share = asked.read("traits.local_numel", functools.partial(traits.local_numel, _LARGE, size))
        least = _LARGE.numel() // size
        # The same margin as of the bytes that a rank may hold: half of what sharding saves.
        most = (least + _LARGE.numel()) // 2
        if not isinstance(share, int) or isinstance(share, bool) or (claims and not least <= share <= most):
            raise asked.wrong(
                f"traits.local_numel({tuple(_LARGE)}, {size})", share, f"a rank's share in elements, {least} or "
                f"little more of {_LARGE.numel()}",
            )  # fmt: skip
