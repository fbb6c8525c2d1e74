"""Writes docs/features.md and the table of chapters in README.md from the contract and the collected suites.

It also writes the contract as JSON, which an installation without docs/ has, for `shardproof page` and for runs, and
the items of its newest version, those of `--effort standard`; the list of a version with a commit is closed.
``--check`` compares instead of writing. The page has a row for each requirement of docs/contract.md: the cases that
check it, the capabilities and the hardware without which none of them runs, and the built-in implementations that
declare these capabilities. Both ways are checked: every requirement has a case, and every case a requirement.

Run as ``python docs/make_features.py`` in the repository's root.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from generating import ROOT, between, collect, run

from shardproof import contract as data
from shardproof.harness.adapters.capability import Capability, Hardware
from shardproof.harness.adapters.registry import load
from shardproof.harness.plugin import cases, effort
from shardproof.harness.plugin.selection import Effort
from shardproof.harness.plugin.state import STATE

CONTRACT = ROOT / "docs/contract.md"
PAGE = ROOT / "docs/features.md"
JSON = ROOT / "shardproof/contract.json"
README = ROOT / "README.md"
#: The text of README.md between these lines is written here.
BEGIN, END = "<!-- features: written by docs/make_features.py -->\n", "<!-- end of features -->\n"
IMPLEMENTATIONS = ("reference", "reference.flat", "torch.fully_shard", "torch.fsdp", "ddp")

_HEAD = """\
# What the suites check

A row for each requirement of [the contract](contract.md). *Cases* are the test functions that check it and the number
of their items for one implementation, worlds counted apart. *Needs* names the capabilities and, in italics, the
hardware that every one of these items needs; `any` stands for requirements that every implementation must meet. *Asked*
are the built-in implementations that declare the capabilities of at least one item, which is then run if the hardware
is there; the other implementations are `unsupported`.

Written by `python docs/make_features.py`; `tests/test_features.py` compares."""


@dataclasses.dataclass(frozen=True)
class Requirement:
    """A row of the contract; ``of_any``: it is required of every implementation that trains."""

    id: str
    of_any: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Chapter:
    """A chapter of the contract; its name is in capitals, as in the ids of its requirements."""

    name: str
    subject: str
    requirements: tuple[Requirement, ...]


@dataclasses.dataclass(frozen=True)
class Item:
    """A collected item of a case, ``test_file.py::test_function``, with the capabilities and hardware that it needs."""

    case: str
    ids: tuple[str, ...]
    needs: frozenset[str]


class Collector:
    """A pytest plugin that notes the collected items of the suites."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.listed: dict[str, data.Item] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        selection = session.config.stash[STATE].selection
        functions = (item for item in session.items if cases.is_case(item) and not cases.launch_of(item).simulates)
        real = [item for item in functions if item.get_closest_marker("nightly") is None]
        self.listed = {cases.case_id(item): _listed(item) for item in effort.choose(real, selection, Effort.STANDARD)}
        # As they are written; a run takes one of each function first.
        for item in sorted(session.items, key=lambda item: (item.path, item.location[1])):
            assert isinstance(item, pytest.Function)
            ids = [name for mark in item.iter_markers("contract") for name in mark.args]
            needs = [str(name) for mark in item.iter_markers("needs") for name in mark.args]
            self.items.append(Item(f"{item.path.name}::{item.originalname}", tuple(ids), frozenset(needs)))


def _listed(item: pytest.Function) -> data.Item:
    needs = {name for mark in item.iter_markers("needs") for name in mark.args}
    hardware = frozenset(str(name) for name in needs if isinstance(name, Hardware))
    options = {f"a name for {mark.args[0]}" for mark in item.iter_markers("takes")}
    others = frozenset(map(str, needs)) - hardware | options
    return data.Item(cases.requirements(item), cases.launch_of(item).size, others, hardware)


def chapters(text: str) -> list[Chapter]:
    """Read the chapters of the contract."""
    found = []
    for part in text.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        name, colon, subject = title.partition(": ")
        rows = re.findall(r"^\| ([A-Z]+-\d+) \| *(any)? *\| (.*) \|$", body, flags=re.MULTILINE)
        if colon and rows:
            found.append(
                Chapter(name, subject, tuple(Requirement(one, bool(of_any), said) for one, of_any, said in rows))
            )
    return found


def problems(contract: Sequence[Chapter], items: Sequence[Item]) -> list[str]:
    """What the contract and the suites disagree about, one line each."""
    written = {requirement.id for chapter in contract for requirement in chapter.requirements}
    checked = {name for item in items for name in item.ids}
    return [
        *(f"docs/contract.md: {name} has no case" for name in sorted(written - checked)),
        *(f"suites: a case names {name}, which docs/contract.md does not have" for name in sorted(checked - written)),
        *(f"suites: {item.case} names no requirement" for item in items if not item.ids),
    ]


def unused(text: str, listed: Mapping[str, data.Item]) -> list[str]:
    """The capabilities and requirements that a profile names and none of its items has, one line each."""
    lines = []
    for name, (said, *lists) in profiles(text).items():
        profile = data.Profile(said, *map(frozenset, lists))
        mine = [item for item in listed.values() if any(profile.has(item, data.CLASSES[one]) for one in lists[0])]
        used = {one for item in mine for one in (*item.needs, *item.requirements)}
        found = [one for one in (*lists[-2], *lists[-1]) if one not in used]
        lines += [f"docs/contract.md: no item of profile {name} has {one}" for one in found]
    return lines


def page(contract: Sequence[Chapter], items: Sequence[Item]) -> str:
    """Write docs/features.md."""
    declared = {name: frozenset(map(str, load(name).capabilities())) for name in IMPLEMENTATIONS}
    parts = [_HEAD]
    for chapter in contract:
        parts.append(f"\n## {chapter.name}: {chapter.subject}\n")
        parts.append("| requirement | cases | needs | asked |\n|---|---|---|---|")
        for requirement in chapter.requirements:
            mine = [item for item in items if requirement.id in item.ids]
            parts.append(
                f"| {requirement.id} | {_cases(mine)} | {_needs(requirement, mine)} | {_asked(mine, declared)} |"
            )
    return "\n".join(parts) + "\n"


def _cases(items: Sequence[Item]) -> str:
    counts: dict[str, int] = {}
    for item in items:
        counts[item.case] = counts.get(item.case, 0) + 1
    return ", ".join(f"{case.partition('::')[2]} ({number})" for case, number in counts.items())


def _needs(requirement: Requirement, items: Sequence[Item]) -> str:
    common = frozenset.intersection(*(item.needs for item in items))
    capabilities = [str(name) for name in Capability if str(name) in common]
    hardware = [f"*{name}*" for name in Hardware if str(name) in common]
    return ", ".join([*(["any"] if requirement.of_any else []), *capabilities, *hardware])


def _asked(items: Sequence[Item], declared: Mapping[str, frozenset[str]]) -> str:
    hardware = frozenset(map(str, Hardware))
    able = [name for name in declared if any(item.needs - hardware <= declared[name] for item in items)]
    return "all" if len(able) == len(declared) else ", ".join(able) or "none"


def table(contract: Sequence[Chapter], items: Sequence[Item]) -> str:
    """Write the table of README.md: a row for each chapter."""
    rows = ["| chapter | what is checked | requirements | cases |", "|---|---|---|---|"]
    for chapter in contract:
        ids = {requirement.id for requirement in chapter.requirements}
        cases = {item.case for item in items if ids & set(item.ids)}
        rows.append(f"| {chapter.name} | {chapter.subject} | {len(ids)} | {len(cases)} |")
    requirements = sum(len(chapter.requirements) for chapter in contract)
    rows.append(f"| all | | {requirements} | {len({item.case for item in items})} |")
    return "\n".join(rows) + "\n"


def versions(text: str) -> dict[str, str]:
    """Read the commit of each version, the newest first; that of an open one is empty."""
    return dict(re.findall(r"^\| (\d{4}\.\d+) \| `?(\w*)`? *\|", text, flags=re.MULTILINE))


def profiles(text: str) -> dict[str, tuple[Any, ...]]:
    """Read the profiles: for whom each is, its classes, what is sharded, the capabilities and the requirements."""
    rows = re.findall(r"^\| `([a-z][\w-]*)` \| (.*) \|$", text, flags=re.MULTILINE)
    cells = {name: row.split(" | ") for name, row in rows}
    return {name: (said, *(re.findall(r"[\w-]+", one) for one in lists)) for name, (said, *lists) in cells.items()}


def as_json(text: str) -> str:
    """Write the contract as JSON, which ``shardproof.contract`` reads."""
    written = [
        [one.name, one.subject, [[row.id, row.text, row.of_any] for row in one.requirements]] for one in chapters(text)
    ]
    whole = {"versions": versions(text), "profiles": profiles(text), "chapters": written}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def listed(text: str, items: Mapping[str, data.Item]) -> dict[pathlib.Path, str]:
    """The list of the newest version; ValueError if it is closed and the suites have other items."""
    newest, commit = next(iter(versions(text).items()))
    path, written = ROOT / f"shardproof/contract-{newest}.tsv", data.written(items)
    if commit and path.read_text() != written:
        raise ValueError(f"docs/contract.md: {newest} is closed, {commit} has its items: begin a version for others")
    return {path: written}


def made() -> dict[pathlib.Path, str]:
    """The contents of each file; ValueError if the contract and the suites disagree."""
    collector = Collector()
    collect(collector)
    text = CONTRACT.read_text()
    contract, items = chapters(text), collector.items
    if found := [*problems(contract, items), *unused(text, collector.listed)]:
        raise ValueError("\n".join(found))
    readme = between(README.read_text(), BEGIN, END, table(contract, items))
    files = {PAGE: page(contract, items), JSON: as_json(text), README: readme}
    return {**files, **listed(text, collector.listed)}


def main(arguments: Iterable[str] | None = None) -> int:
    """Write the page, the JSON and README's table, or compare them; the exit code is 1 if something disagrees."""
    about = "docs/features.md, contract.json and README's table, from the contract and the suites"
    return run(arguments, made, about=about, script="docs/make_features.py")


if __name__ == "__main__":
    raise SystemExit(main())
