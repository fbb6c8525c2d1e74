"""The contract as data: its versions, requirements and profiles, and the list of the items of a version.

docs/contract.md is the source: ``python docs/make_features.py`` writes ``contract.json`` from it, and the list of the
newest version from the suites. Imports neither torch nor the harness.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

_FILES = resources.files("shardproof")

Chapter = tuple[str, str, list[tuple[str, str, bool]]]
"""Name, subject, and of each requirement the id, the text and whether it is of *any*."""

_DIVIDED = {"mixed-precision": frozenset({"param-dtype", "reduce-dtype"})}
"""By the name of a capability in the lists of closed versions, those that an item needed where it needed this one."""

SHARDS = ("parameters", "gradients", "optimizer")
"""What an implementation may shard."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A case with its parameters and ranks, the capabilities that it needs by name, and what else of the host."""

    requirements: tuple[str, ...]
    ranks: int
    needs: frozenset[str]
    hardware: frozenset[str]


@dataclasses.dataclass(frozen=True)
class HardwareClass:
    """Hosts on which the same items can run: the most ranks, and what a host has beside them."""

    ranks: int
    hardware: frozenset[str]

    def has(self, item: Item) -> bool:
        return item.ranks <= self.ranks and item.hardware <= self.hardware


CLASSES = {"cpu-4": HardwareClass(4, frozenset()), "nccl-2": HardwareClass(2, frozenset({"accelerator", "streams"}))}
"""The hardware classes by name."""


def class_of(device: str, *, has_nccl: bool) -> str:
    """Return the hardware class of a run by the device type of its ranks; empty if it is of none."""
    if device == "cpu":
        return "cpu-4"
    return "nccl-2" if has_nccl else ""


@dataclasses.dataclass(frozen=True)
class Profile:
    """What a kind of user needs: items that check one of the requirements and need no other than these capabilities.

    Only the hardware classes in ``classes`` can have it, and an implementation of it shards what ``shards`` says.
    """

    subject: str
    classes: frozenset[str]
    shards: frozenset[str]
    capabilities: frozenset[str]
    requirements: frozenset[str]

    def has(self, item: Item, hardware: str) -> bool:
        is_asked = hardware in self.classes and CLASSES[hardware].has(item) and item.needs <= self.capabilities
        return is_asked and not self.requirements.isdisjoint(item.requirements)


def versions() -> Mapping[str, str]:
    """Return the commit of each version of the contract, the newest first; that of an open version is empty."""
    found: dict[str, str] = _data()["versions"]
    return found


def version() -> str:
    """Return the newest version, which is that of this code."""
    return next(iter(versions()))


def version_of(said: str) -> str:
    """Return the version whose items a run is counted by, from its ``environment.contract``.

    The list of a closed version stays, so that items of a later version do not count as lacking. Runs from before the
    first version, and merged runs of several versions, are counted by the first.
    """
    return said if said in versions() else [*versions()][-1]


def chapters() -> list[Chapter]:
    """Return the chapters, in order."""
    found: list[Chapter] = _data()["chapters"]
    return found


@functools.cache
def profiles() -> Mapping[str, Profile]:
    """Return the profiles by name, in the order of the contract."""
    return {name: Profile(said, *map(frozenset, lists)) for name, (said, *lists) in _data()["profiles"].items()}


@functools.cache
def items(of: str | None = None) -> Mapping[str, Item]:
    """Return the items of a version, by default of the newest one, by the ids that they have in run files.

    The file has a line for each case and what its items need, and below it the ends of their ids.
    """
    found = {}
    for line in (_FILES / f"contract-{of or version()}.tsv").read_text(encoding="utf-8").splitlines():
        function, *words = line.split("\t")
        if function:
            case, common = function, [tuple(one for one in word.split(", ") if one != "-") for word in words]
        else:
            requirements, needs, hardware = common
            ranks = int(words[0].partition("-")[0].removeprefix("w"))
            found[f"{case}[{words[0]}]"] = Item(requirements, ranks, _as_now(needs), frozenset(hardware))
    return found


def _as_now(needs: Iterable[str]) -> frozenset[str]:
    """Return what an item of any version needs by the names of this one, which profiles have."""
    return frozenset().union(*(_DIVIDED.get(one, {one}) for one in needs))


def items_of_profile(name: str, hardware: str, *, of: str | None = None) -> frozenset[str]:
    """Return the ids of the items of a profile that a hardware class can have, in a version, by default the newest."""
    return frozenset(id_ for id_, item in items(of).items() if profiles()[name].has(item, hardware))


@functools.cache
def _data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_FILES / "contract.json").read_text(encoding="utf-8"))
    return found
