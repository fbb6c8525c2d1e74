"""Writes docs/features.md and the table of chapters in README.md from the contract and the collected suites.

It also writes the contract as JSON, which an installation without docs/ has, for `shardproof page` and for runs.
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

import pytest
from generating import ROOT, between, collect, run

from shardproof.harness.adapters.capability import Capability, Hardware
from shardproof.harness.adapters.registry import load

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

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # As they are written; a run takes one of each function first.
        for item in sorted(session.items, key=lambda item: (item.path, item.location[1])):
            assert isinstance(item, pytest.Function)
            ids = [name for mark in item.iter_markers("contract") for name in mark.args]
            needs = [str(name) for mark in item.iter_markers("needs") for name in mark.args]
            self.items.append(Item(f"{item.path.name}::{item.originalname}", tuple(ids), frozenset(needs)))


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


def as_json(contract: Sequence[Chapter]) -> str:
    """Write the contract as a list of chapters: name, subject, and of each requirement id, text and ``of_any``."""
    written = [
        [one.name, one.subject, [[row.id, row.text, row.of_any] for row in one.requirements]] for one in contract
    ]
    return json.dumps(written, indent=1, ensure_ascii=False) + "\n"


def made() -> dict[pathlib.Path, str]:
    """The contents of each file; ValueError if the contract and the suites disagree."""
    collector = Collector()
    collect(collector)
    contract, items = chapters(CONTRACT.read_text()), collector.items
    if found := problems(contract, items):
        raise ValueError("\n".join(found))
    readme = between(README.read_text(), BEGIN, END, table(contract, items))
    return {PAGE: page(contract, items), JSON: as_json(contract), README: readme}


def main(arguments: Iterable[str] | None = None) -> int:
    """Write the page, the JSON and README's table, or compare them; the exit code is 1 if something disagrees."""
    about = "docs/features.md, contract.json and README's table, from the contract and the suites"
    return run(arguments, made, about=about, script="docs/make_features.py")


if __name__ == "__main__":
    raise SystemExit(main())
