"""Writes docs/features.md, docs/capabilities.md, contract.json and the list of items from the contract and the suites.

The methods of capabilities in docs/adapter-reference.md are written from the docstrings of the adapter's protocol.

They come from the contract, the collected suites and the enum of capabilities. It also writes the contract as JSON,
which an installation without docs/ has, and the items of its newest version, those of `--effort standard`; the list of
a version with a commit is closed. ``--check`` compares instead of writing. docs/features.md has a row for each
requirement: the cases that check it, the capabilities and hardware that all or some of their items need, and the
built-in implementations that declare these. Both ways are checked: every requirement has a case, every case a
requirement.

Run as ``python docs/make_features.py`` in the repository's root.
"""

import contextlib
import inspect
import io
import json
import pathlib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest
from generating import ROOT, write_or_compare

from shardproof.contract import CLASSES, Chapter, Item, Profile
from shardproof.harness.adapters.base import Adapter, KeyKind, StateForm, members_of_capabilities
from shardproof.harness.adapters.capability import PREREQUISITES, Capability, Hardware, families
from shardproof.harness.adapters.registry import load
from shardproof.harness.plugin import cases, effort
from shardproof.harness.plugin.options import Effort
from shardproof.harness.plugin.state import STATE

CONTRACT = ROOT / "docs/contract.md"
PAGE = ROOT / "docs/features.md"
CAPABILITIES = ROOT / "docs/capabilities.md"
REFERENCE = ROOT / "docs/adapter-reference.md"
JSON = ROOT / "shardproof/contract.json"
IMPLEMENTATIONS = ("reference", "reference.flat", "torch.fully_shard", "torch.fsdp", "ddp")

_HEAD = """\
# What the suites check

First the chapters, then a row for each requirement of [the contract](contract.md). *Cases* are the test functions that
check it and the number of their items for one implementation, worlds counted apart. *Needs* names the capabilities and,
in italics, the hardware that every one of these items needs, and after `some` those that only some items do; `any`
stands for requirements that every implementation must meet. *Asked* are the built-in implementations that declare the
capabilities of at least one item, which is then run if the hardware is there; the other implementations are
`unsupported`.

Written by `python docs/make_features.py`; `tests/test_features.py` compares."""


_CAPABILITIES = """\
# Capabilities

The features that an adapter can declare and that cases may need ([when to declare one](adapters.md#5-what-to-declare)).
Each family begins with what to declare of it. In code `single-rank` is `Capability.SINGLE_RANK`. *Checked with* are
capabilities without which no case can check it: with these and `COMMON`, which almost every adapter declares, some item
needs no others, and an adapter that ignores the capability fails there (`tests/test_capabilities.py`). The last column
is about some adapters; [implementations.md](implementations.md) says what each of all lacks. For any, or for your own,
`shardproof implementations --capabilities NAME` prints this list.

Written by `python docs/make_features.py`; `tests/test_features.py` compares."""


class Collector:
    """A pytest plugin that notes the collected items of the suites, by their ids, and which a version has."""

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}
        self.listed: dict[str, Item] = {}
        self._simulated: list[pytest.Item] = []  # cases that run with --simulate alone

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._simulated += [item for item in items if item.get_closest_marker("simulated") is not None]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # As they are written; a run takes one of each function first.
        found = filter(cases.is_case, [*session.items, *self._simulated])
        items = sorted(found, key=lambda item: (item.path, item.location[1]))
        self.items = {cases.case_id(item): _item(item) for item in items}
        asked = [item for item in items if not any(map(item.get_closest_marker, ("nightly", "simulated")))]
        kept = effort.choose(asked, session.config.stash[STATE].selection, Effort.STANDARD)
        self.listed = {id_: self.items[id_] for id_ in map(cases.case_id, kept)}


def _item(item: pytest.Function) -> Item:
    needs = {str(name) for mark in item.iter_markers("needs") for name in mark.args}
    options = {f"a name for {mark.args[0]}" for mark in item.iter_markers("takes")}
    hardware = frozenset(needs & set(Hardware))
    return Item(cases.requirements(item), cases.launch_of(item).size, frozenset(needs | options) - hardware, hardware)


def chapters(text: str) -> list[Chapter]:
    """Read the chapters of the contract; their names are in capitals, as in the ids of their requirements."""
    found = []
    for part in text.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        name, colon, subject = title.partition(": ")
        rows = re.findall(r"^\| ([A-Z]+-\d+) \| *(any)? *\| (.*) \|$", body, flags=re.MULTILINE)
        if colon and rows:
            found.append((name, subject, [(id_, said, bool(of_any)) for id_, of_any, said in rows]))
    return found


def problems(contract: Sequence[Chapter], items: Mapping[str, Item]) -> list[str]:
    """What the contract and the suites disagree about, one line each."""
    written = {id_ for _, _, rows in contract for id_, _, _ in rows}
    checked = {name for item in items.values() for name in item.requirements}
    return [
        *(f"docs/contract.md: {name} has no case" for name in sorted(written - checked)),
        *(f"suites: a case names {name}, which docs/contract.md does not have" for name in sorted(checked - written)),
        *(f"suites: {id_} names no requirement" for id_, item in items.items() if not item.requirements),
    ]


def unused(text: str, listed: Mapping[str, Item]) -> list[str]:
    """The capabilities and requirements that a profile names and none of its items has, one line each."""
    lines = []
    for name, (said, *lists) in profiles(text).items():
        profile = Profile(said, *map(frozenset, lists))
        mine = [item for item in listed.values() if any(profile.has(item, hardware) for hardware in CLASSES)]
        used = {one for item in mine for one in (*item.needs, *item.requirements)}
        named = [*lists[-2], *lists[-1]]
        lines += [f"docs/contract.md: no item of profile {name} has {one}" for one in named if one not in used]
    return lines


def page(contract: Sequence[Chapter], items: Mapping[str, Item]) -> str:
    """Write docs/features.md."""
    declared = {
        name: {*map(str, load(name).capabilities()), *(f"a name for {one}" for one in load(name).option_names)}
        for name in IMPLEMENTATIONS
    }
    parts = [_HEAD, "", table(contract, items)]
    for chapter, subject, rows in contract:
        parts.append(f"\n## {chapter}: {subject}\n")
        parts.append("| requirement | cases | needs | asked |\n|---|---|---|---|")
        for name, _, of_any in rows:
            mine = {id_: item for id_, item in items.items() if name in item.requirements}
            parts.append(f"| {name} | {_cases(mine)} | {_needs(of_any, mine)} | {_asked(mine, declared)} |")
    return "\n".join(parts) + "\n"


def capabilities() -> str:
    """Write docs/capabilities.md."""
    declared = {name: load(name).capabilities() for name in IMPLEMENTATIONS}
    parts = [_CAPABILITIES]
    for name, recipe, members in families():
        heads = "| capability | what it says | checked with | declared by |\n|---|---|---|---|"
        parts.append(f"\n## {name}\n\n{recipe}\n\n{heads}")
        for one, said in members.items():
            names = [name for name in declared if one in declared[name]]
            by = "all" if len(names) == len(declared) else ", ".join(names)
            parts.append(f"| `{one}` | {said} | {', '.join(sorted(PREREQUISITES.get(one, ())))} | {by} |")
    return "\n".join(parts) + "\n"


def methods(text: str) -> str:
    """The page of the reference, with its table of the methods of capabilities as the protocol has them."""
    head = "| method | capability | what it does and returns |\n|---|---|---|\n"
    before, _, rest = text.partition(head)
    after = rest.partition("\n\n")[2]
    if not after:
        raise ValueError(f"{REFERENCE.name} has no table of the methods of capabilities")
    rows = [_method(name, value) for name, value in vars(Adapter).items() if inspect.isfunction(value)]
    return f"{before}{head}{chr(10).join(filter(None, rows))}\n\n{after}"


def _method(name: str, method: Any) -> str:
    """The row of one method, from its signature and docstring; empty if it belongs to no capability."""
    said = inspect.getdoc(method) or ""
    needed = re.search(r"Needs\s+:attr:`Capability\.(\w+)`", said)
    if needed is None:
        return ""
    signature = str(inspect.signature(method))
    for name_of_type, words in {"StateForm": StateForm, "KeyKind": KeyKind}.items():
        signature = signature.replace(inspect.formatannotation(words), name_of_type)
    # Types without the modules, which whoever writes an adapter knows.
    signature = re.sub(r"\b(?:\w+\.)+(?=\w)", "", signature)
    arguments = signature.replace("(self, ", "(").replace("(self)", "()")
    # Without the arguments: their names say enough, and the docstring has the rest.
    parts = re.split(r"\n(Args|Returns|Yields):", said.replace(f"{needed[0]}.", ""))
    kept = [parts[0], *(text for head, text in zip(parts[1::2], parts[2::2], strict=True) if head != "Args")]
    text = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"`\1`", " ".join(" ".join(kept).split()))
    default = "" if name in members_of_capabilities() else " There is a default."
    cells = [
        cell.replace("|", "\\|") for cell in (f"`{name}{arguments}`", f"`{Capability[needed[1]]}`", text + default)
    ]
    return f"| {' | '.join(cells)} |".replace("``", "`")


def _cases(items: Mapping[str, Item]) -> str:
    return ", ".join(f"{case.partition('::')[2]} ({number})" for case, number in Counter(map(_case, items)).items())


def _case(id_: str) -> str:
    return id_.partition("[")[0]


def _needs(of_any: bool, items: Mapping[str, Item]) -> str:
    found = [item.needs | item.hardware for item in items.values()]
    common = frozenset.intersection(*found)
    every = ", ".join([*(["any"] if of_any else []), *_named(common)])
    some = ", ".join(_named(frozenset.union(*found) - common))
    return "; ".join(filter(None, [every, some and f"some: {some}"]))


def _named(needs: Collection[str]) -> list[str]:
    """The names of capabilities, and in italics those of hardware, in their order."""
    return [*(one for one in Capability if one in needs), *(f"*{one}*" for one in Hardware if one in needs)]


def _asked(items: Mapping[str, Item], declared: Mapping[str, set[str]]) -> str:
    able = [name for name in declared if any(item.needs <= declared[name] for item in items.values())]
    return "all" if len(able) == len(declared) else ", ".join(able) or "none"


def table(contract: Sequence[Chapter], items: Mapping[str, Item]) -> str:
    """Write the table at the top of the page: a row for each chapter."""
    rows = ["| chapter | what is checked | requirements | cases |", "|---|---|---|---|"]
    for chapter, subject, requirements in contract:
        ids = {id_ for id_, _, _ in requirements}
        cases = {_case(id_) for id_, item in items.items() if ids & set(item.requirements)}
        rows.append(f"| {chapter} | {subject} | {len(ids)} | {len(cases)} |")
    count = sum(len(requirements) for _, _, requirements in contract)
    rows.append(f"| all | | {count} | {len(set(map(_case, items)))} |")
    return "\n".join(rows)


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
    whole = {"versions": versions(text), "profiles": profiles(text), "chapters": chapters(text)}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def listed(text: str, items: Mapping[str, Item]) -> dict[pathlib.Path, str]:
    """The list of the newest version; ValueError if it is closed and the suites have other items."""
    groups: dict[str, list[str]] = {}
    for id_, item in items.items():
        case, _, end = id_.removesuffix("]").partition("[")
        needs = (", ".join(names) or "-" for names in (item.requirements, sorted(item.needs), sorted(item.hardware)))
        groups.setdefault("\t".join([case, *needs]), []).append(f"\t{end}\n")
    written = "".join(f"{head}\n{''.join(sorted(groups[head]))}" for head in sorted(groups))
    newest, commit = next(iter(versions(text).items()))
    path = ROOT / f"shardproof/contract-{newest}.tsv"
    if commit and path.read_text() != written:
        raise ValueError(f"docs/contract.md: {newest} is closed, {commit} has its items: begin a version for others")
    return {path: written}


def made() -> dict[pathlib.Path, str]:
    """The contents of each file; ValueError if the contract and the suites disagree."""
    collector = Collector()
    # For one implementation, nightly cases included.
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "nightly or not nightly", str(ROOT / "suites")]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(arguments, plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise ValueError(f"the suites cannot be collected:\n{output.getvalue()}")
    text = CONTRACT.read_text()
    contract, items = chapters(text), collector.items
    if found := [*problems(contract, items), *unused(text, collector.listed)]:
        raise ValueError("\n".join(found))
    return {
        PAGE: page(contract, items),
        CAPABILITIES: capabilities(),
        REFERENCE: methods(REFERENCE.read_text()),
        JSON: as_json(text),
        **listed(text, collector.listed),
    }


if __name__ == "__main__":
    raise SystemExit(write_or_compare(made, __doc__))
