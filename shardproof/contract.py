"""The contract as data: its versions, requirements and profiles, and the list of the items of a version.

docs/contract.md is the source: ``python docs/make_features.py`` writes ``contract.json`` from it, and the list of the
newest version from the suites. Imports neither torch nor the harness.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any


@dataclasses.dataclass(frozen=True)
class Item:
    """An item of the list: a case with its parameters and its world, as any implementation is asked it.

    Attributes:
        requirements: the ids of the requirements that it checks.
        ranks: the number of ranks of its world.
        needs: the capabilities without which it is not asked, by name; ``a name for X`` is an option of the adapter.
        hardware: what the host must have beside the ranks: ``accelerator``, ``streams``.
    """

    requirements: tuple[str, ...]
    ranks: int
    needs: frozenset[str]
    hardware: frozenset[str]


@dataclasses.dataclass(frozen=True)
class HardwareClass:
    """Hosts on which the same items can run: the most ranks, and what a host has beside them."""

    title: str
    ranks: int
    hardware: frozenset[str]

    def has(self, item: Item) -> bool:
        """Return whether the item can run there."""
        return item.ranks <= self.ranks and item.hardware <= self.hardware


@dataclasses.dataclass(frozen=True)
class Profile:
    """What a kind of user needs.

    Attributes:
        subject: whom it is for, in words.
        classes: the hardware classes that can have it.
        shards: what an implementation of the profile shards: parameters, gradients, optimizer.
        capabilities: those that an implementation of the profile has; no item of the profile needs another.
        requirements: the ids of the requirements whose items these are.
    """

    subject: str
    classes: frozenset[str]
    shards: frozenset[str]
    capabilities: frozenset[str]
    requirements: frozenset[str]

    def has(self, item: Item, where: HardwareClass) -> bool:
        """Return whether the item belongs to the profile on hosts of this class."""
        return where.has(item) and item.needs <= self.capabilities and bool(self.requirements & {*item.requirements})


CLASSES = {
    "cpu-4": HardwareClass("CPU, gloo, up to 4 ranks", 4, frozenset()),
    "nccl-2": HardwareClass("2 GPUs, NCCL", 2, frozenset({"accelerator", "streams"})),
}
"""The hardware classes by name."""


SHARDS = ("parameters", "gradients", "optimizer")
"""What an implementation may shard."""


def versions() -> Mapping[str, str]:
    """Return the commit of each version of the contract, the newest first; that of an open version is empty."""
    found: dict[str, str] = _data()["versions"]
    return found


def version() -> str:
    """Return the newest version, which is that of this code."""
    return next(iter(versions()))


def check(asked: str) -> None:
    """Refuse a version whose items this code does not have.

    Raises:
        ValueError: in one line, with the commit that has it or the versions that there are.
    """
    if asked not in versions():
        raise ValueError(f"the contract has no version {asked}; there is {', '.join(versions())}")
    if asked != version():
        raise ValueError(f"this is version {version()} of the contract; commit {versions()[asked]} has {asked}")


def chapters() -> list[tuple[str, str, list[tuple[str, str, bool]]]]:
    """Return the chapters: name, subject, and of each requirement id, text and whether it is of *any*."""
    found: list[tuple[str, str, list[tuple[str, str, bool]]]] = _data()["chapters"]
    return found


def profiles() -> Mapping[str, Profile]:
    """Return the profiles by name, in the order of the contract."""
    return {name: Profile(said, *map(frozenset, lists)) for name, (said, *lists) in _data()["profiles"].items()}


@functools.cache
def items(of: str | None = None) -> Mapping[str, Item]:
    """Return the items of a version by their ids, those of run files; of the newest one by default.

    Raises:
        FileNotFoundError: there is no list of this version here.
    """
    found = {}
    for line in _text(f"contract-{of or version()}.tsv").splitlines():
        case, *words = line.split("\t")
        if case:
            function, common = case, [tuple(one for one in word.split(", ") if one != "-") for word in words]
        else:
            requirements, needs, hardware = common
            ranks = int(re.match(r"w(\d+)", words[0])[1])  # type: ignore[index]
            found[f"{function}[{words[0]}]"] = Item(requirements, ranks, frozenset(needs), frozenset(hardware))
    return found


def written(found: Mapping[str, Item]) -> str:
    """Return the list as its file has it: a line for each case and what its items need, and below it their ends."""
    groups: dict[str, list[str]] = {}
    for id_, item in found.items():
        function, _, end = id_.partition("[")
        needs = (", ".join(names) or "-" for names in (item.requirements, sorted(item.needs), sorted(item.hardware)))
        groups.setdefault("\t".join([function, *needs]), []).append(end.removesuffix("]"))
    return "".join(f"{head}\n" + "".join(f"\t{end}\n" for end in sorted(groups[head])) for head in sorted(groups))


@functools.cache
def _data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_text("contract.json"))
    return found


def _text(name: str) -> str:
    return resources.files("shardproof").joinpath(name).read_text(encoding="utf-8")
