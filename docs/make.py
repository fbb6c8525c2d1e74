"""Makes the pages that programs write: of the contract, the suites, the adapters, the findings and the published runs.

``python docs/make.py`` makes those that depend on the suites or on what is installed, in ``out/docs``, which git
ignores. A wheel or sdist that is built afterwards has them, and so has the page of results (``docs/make_page.py``). The
others are committed, and made when they are named, as in ``python docs/make.py findings matrix``; ``--check`` compares
them instead. Run it in the repository's root.
"""

import argparse
import functools
import inspect
import os
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import matrix
from matrix import ROOT

from planted.upstream import __main__ as upstream
from shardproof import contract, findings, folders, listing, runfile
from shardproof.contract import CLASSES, Chapter, Item
from shardproof.harness.adapters import registry
from shardproof.harness.adapters.base import Adapter, StateForm, members_of_capabilities
from shardproof.harness.adapters.capability import PREREQUISITES, Capability, Hardware, families
from shardproof.harness.adapters.fsdp1 import Fsdp1Methods, KeyKind
from shardproof.suites import crossed

IMPLEMENTATIONS = ("reference", "reference.flat", "torch.fully_shard", "torch.fsdp", "ddp")

#: Of these every three features that they claim are crossed, of the others every two.
TRIPLES = ("torch.fsdp", "torch.fully_shard")
#: What takes long is not combined with more than is asked.
SELDOM = ("compiled",)

FEATURES = """\
# What the suites check

First the chapters, then a row for each requirement of [the contract](contract.md). *Cases* are the test functions that
check it and the number of their items for one implementation, worlds counted apart. *Needs* names the capabilities and,
in italics, the hardware that every one of these items needs, and after `some` those that only some items do; `any`
stands for requirements that every implementation must meet. *Asked* are the built-in implementations that declare the
capabilities of at least one item, which is then run if the hardware is there; the other implementations are
`unsupported`.

Made by `python docs/make.py features`."""

CAPABILITIES = """\
# Capabilities

The features that an adapter can declare and that cases may need ([when to declare one](adapters.md#5-what-to-declare)).
Each family begins with what to declare of it. In code `single-rank` is `Capability.SINGLE_RANK`. *Checked with* are
capabilities without which no case can check it: with these and `COMMON`, which almost every adapter declares, some item
needs no others, and an adapter that ignores the capability fails there (`tests/test_capabilities.py`). The last column
is about some adapters; [implementations.md](implementations.md) says what each of all lacks. For any, or for your own,
`shardproof implementations --capabilities NAME` prints this list.

Made by `python docs/make.py capabilities`."""

METHODS = """
## Methods of capabilities

A class that declares a capability and does not define its methods is refused before a rank starts. The docstrings of
`shardproof.harness.adapters.base.Adapter`, of which this is made, also have the arguments.

| method | capability | what it does and returns |
|---|---|---|"""

CROSSED = """\
# Features crossed

Most bugs that were missed needed three features at once. Each row of
[`suites/crossed.toml`](../suites/crossed.toml) is a training with one value of each axis, an ordinary item of
`suites/test_drawn_crossed.py`; it is compared, bit for bit, with full copies that make the same casts. An
implementation is asked the rows whose values it claims.

Made by `python docs/make.py crossed`."""

FINDINGS = """\
# Findings

What the suites found in other implementations: one file each in [findings/](../findings), which describes the error and
shows it by a program that needs nothing of shardproof. A case that meets a finding is expected to fail by an entry in
`suites/expectations/<implementation>.toml`, which links to its file ([options.md](options.md#known-failures)). Where a
whole feature is wrong its capability is not declared instead, as in F-4.

`OMP_NUM_THREADS=1 python findings/F002.py` runs one program. `shardproof findings --run` runs all those for which the
host has what they need, and says of each whether the error is there, by the headers that
[shardproof/findings.py](../shardproof/findings.py) describes. *State* is `mended in torch X` where
the header has `fixed_in`; otherwise what the newest version of torch showed with which the program was run.

Threads that a header lists as `upstream` are about exactly that error, in the tracker of the implementation, with their
state when they were looked up (pull requests of pytorch/pytorch are closed when they land); `related` are others that
help a reader. Of a finding without `upstream` we know no such thread.

[unreported.md](unreported.md) has those of `torch.fully_shard` that nobody has reported, by severity, with reports.

Written by `python docs/make.py findings`; `tests/test_findings.py` compares.

| finding | title | implementation | state | upstream |
|---|---|---|---|---|"""

UNREPORTED = """\
# Findings of `fully_shard` that nobody has reported

[Findings](findings.md) of `torch.fully_shard` of which we know no thread in the tracker of PyTorch, and which no
release has mended, as far as the program was run; the gravest first. *Seen* is the newest release that showed the
error. A *report* is for a maintainer, and has nothing of shardproof: a program of at most {lines} lines, the output
that it had with torch 2.15.0, the right output, and the suspected functions. `shardproof findings --report F-2 -o
report.md` writes one anew, after it has run the program with the torch that is installed. Nothing is posted.

Written by `python docs/make.py unreported`; `tests/test_findings.py` compares."""

#: The implementation whose findings that page has.
WATCHED = "torch.fully_shard"


# Of the contract and the suites


@functools.cache
def collected() -> listing.Collector:
    """Collect the suites, which agree with the contract.

    Raises:
        ValueError: they do not; the text has a line for each difference.
    """
    found = listing.collected()
    written = contract.chapters()
    if lines := [*problems(written, found.items), *unused(contract.profiles(), found.listed)]:
        raise ValueError("\n".join(lines))
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


def unused(profiles: Mapping[str, contract.Profile], listed: Mapping[str, Item]) -> list[str]:
    """The capabilities and requirements that a profile names and none of its items has, one line each."""
    lines = []
    for name, profile in profiles.items():
        mine = [item for item in listed.values() if any(profile.has(item, hardware) for hardware in CLASSES)]
        used = {one for item in mine for one in (*item.needs, *item.requirements)}
        named = sorted(profile.capabilities) + sorted(profile.requirements)
        lines += [f"docs/contract.md: no item of profile {name} has {one}" for one in named if one not in used]
    return lines


def items() -> str:
    """The list of the newest version, as ``shardproof.contract`` keeps that of an open one.

    Raises:
        ValueError: the version is closed and the suites have other items.
    """
    text = listing.written(collected().listed)
    newest, commit = next(iter(contract.versions().items()))
    closed = contract.PACKAGE / f"contract-{newest}.tsv"
    if commit and closed.read_text(encoding="utf-8") != text:
        raise ValueError(f"docs/contract.md: {newest} is closed, {commit} has its items: begin a version for others")
    return f"{contract.digest()}\n{text}"


def features(chapters: Sequence[Chapter], items: Mapping[str, Item]) -> str:
    """The page of what the suites check."""
    declared = {}
    for name in IMPLEMENTATIONS:
        adapter = registry.load(name)
        declared[name] = {*map(str, adapter.capabilities()), *(f"a name for {one}" for one in adapter.option_names)}
    parts = [FEATURES, "", table(chapters, items)]
    for chapter, subject, rows in chapters:
        parts.append(f"\n## {chapter}: {subject}\n")
        parts.append("| requirement | cases | needs | asked |\n|---|---|---|---|")
        for name, _, of_any in rows:
            mine = {id_: item for id_, item in items.items() if name in item.requirements}
            parts.append(f"| {name} | {_cases(mine)} | {_needs(of_any, mine)} | {_asked(mine, declared)} |")
    return "\n".join(parts) + "\n"


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
    return [
        *(one for *_, members in families() for one in members if one in needs),
        *(f"*{one}*" for one in Hardware if one in needs),
    ]


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


# Of the adapters


def capabilities() -> str:
    """The page of the capabilities, with the methods that an adapter defines for some."""
    declared = {name: registry.load(name).capabilities() for name in IMPLEMENTATIONS}
    parts = [CAPABILITIES]
    for name, recipe, members in families():
        heads = "| capability | what it says | checked with | declared by |\n|---|---|---|---|"
        parts.append(f"\n## {name}\n\n{recipe}\n\n{heads}")
        for one, said in members.items():
            names = [name for name in declared if one in declared[name]]
            by = "all" if len(names) == len(declared) else ", ".join(names)
            parts.append(f"| `{one}` | {said} | {', '.join(sorted(PREREQUISITES.get(one, ())))} | {by} |")
    methods = [*vars(Adapter).items(), *vars(Fsdp1Methods).items()]
    rows = [_method(name, value) for name, value in methods if inspect.isfunction(value)]
    return "\n".join([*parts, METHODS, *filter(None, rows)]) + "\n"


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
    default = "" if name in members_of_capabilities(Fsdp1Methods) else " There is a default."
    cells = [
        cell.replace("|", "\\|") for cell in (f"`{name}{arguments}`", f"`{Capability[needed[1]]}`", text + default)
    ]
    return f"| {' | '.join(cells)} |".replace("``", "`")


@functools.cache
def _claims() -> dict[str, frozenset[str]]:
    return {name: frozenset(registry.load(name).capabilities()) for name in sorted(registry.BUILT_IN)}


@functools.cache
def _drawn() -> list[crossed.Row]:
    """Draw for the triples of some implementations, then for the pairs of every other one."""
    rows: list[crossed.Row] = []
    for name, claims in sorted(_claims().items(), key=lambda one: one[0] not in TRIPLES):
        rows += crossed.draw(claims, 3 if name in TRIPLES else 2, known=rows, seldom=SELDOM)
    return rows


def drawn_rows() -> str:
    """The trainings that cross features; to draw anew changes items, of which published runs keep the ids."""
    head = f"# Written by docs/make.py: in each row the values of\n# {', '.join(crossed.AXES)}.\nrows = ["
    return "\n".join([head, *(f'    "{" ".join(row.values())}",' for row in _drawn()), "]", ""])


def crossed_features() -> str:
    """The page of what these rows cover."""
    lines = [CROSSED, "", "| axis | values |", "|---|---|"]
    lines += [f"| {axis} | {', '.join(values)} |" for axis, values in crossed.AXES.items()]
    lines += ["", "| implementation | rows | pairs | triples |", "|---|---|---|---|"]
    for name, claims in _claims().items():
        counts = []
        for size in (2, 3):
            asked = set(crossed.possible(claims, size))
            counts.append(f"{len(asked & crossed.covered(_drawn(), claims, size))} of {len(asked)}")
        asked_rows = sum(crossed.needs_of(row) <= claims for row in _drawn())
        lines.append(f"| {name} | {asked_rows} | {counts[0]} | {counts[1]} |")
    lines += ["", "Impossible together:", ""]
    for part, why in crossed.IMPOSSIBLE:
        lines.append(f"- {' and '.join(f'{axis} {value}' for axis, value in part.items())}: {why}.")
    return "\n".join([*lines, ""])


# Of what was found


def findings_page(found: Iterable[findings.KnownFinding]) -> str:
    """The index of the findings."""
    rows = []
    for one in found:
        link, title = f"[{one.id}](../findings/{one.path.name})", one.title.replace("|", "\\|")
        names = ", ".join(f"`{name}`" for name in one.implementations)
        threads = "; ".join(map(findings.markdown, one.upstream)).replace("|", "\\|")
        rows.append(f"| {link} | {title} | {names} | {one.state} | {threads} |")
    return "\n".join([FINDINGS, *rows]) + "\n"


def unreported_page(found: Sequence[findings.KnownFinding]) -> str:
    """The findings of ``fully_shard`` without a thread, by severity, with their reports."""
    mine = [one for one in found if WATCHED in one.implementations and one.is_there and not one.is_known_upstream]
    parts = [UNREPORTED.format(lines=findings.MAX_LINES)]
    for severity, meaning in findings.SEVERITIES.items():
        chosen = [one for one in mine if one.severity == severity]
        parts.append(f"\n## {severity.capitalize()}: {meaning}\n")
        parts.append("| finding | title | seen | report |\n|---|---|---|---|")
        for one in chosen:
            report = one.path.parent / "reports" / f"{one.path.stem}.md"
            cells = (
                f"[{one.id}](../findings/{one.path.name})",
                one.title.replace("|", "\\|"),
                one.seen or "by a program of another form",
                f"[{report.name}](../findings/reports/{report.name})" if report.exists() else "",
            )
            parts.append(f"| {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


# What is made


#: By name, the pages that a clone does not have, in ``out/docs``.
MADE: Mapping[str, tuple[str, Callable[[], str]]] = {
    "features": ("features.md", lambda: features(contract.chapters(), collected().items)),
    "capabilities": ("capabilities.md", capabilities),
    "crossed": ("crossed.md", crossed_features),
    "history": ("history.md", upstream.page),
    "items": (f"contract-{contract.version()}.tsv", items),
    "schema": ("run-file.schema.json", runfile.schema_text),
}

#: By name, the pages that are committed.
COMMITTED: Mapping[str, tuple[pathlib.Path, Callable[[], str]]] = {
    "findings": (ROOT / "docs/findings.md", lambda: findings_page(findings.load())),
    "unreported": (ROOT / "docs/unreported.md", lambda: unreported_page(findings.load())),
    "matrix": (ROOT / "docs/matrix.md", lambda: matrix.page(matrix.runs(), matrix.known())),
    "readme": (ROOT / "README.md", lambda: matrix.readme(matrix.runs())),
    "drawn": (ROOT / "suites/crossed.toml", drawn_rows),
}


def linked(text: str, folder: pathlib.Path) -> str:
    """Return a page whose links lead from another folder than docs/, in which it would stand."""
    pages = {name for name, _ in MADE.values()}

    def moved(found: re.Match[str]) -> str:
        path, anchor = found[1], found[2] or ""
        there = path if path in pages else os.path.relpath(ROOT / "docs" / path, folder)
        return f"]({there}{anchor})"

    return re.sub(r"\]\((?!https?:)([^)#]+)(#[^)]*)?\)", moved, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make pages, or compare those that are committed; the exit code is 1 if one is out of date or cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(MADE)} (default: all), {', '.join(COMMITTED)}"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in {*MADE, *COMMITTED}]:
        parser.error(f"{unknown[0]!r} is no page; known are {', '.join([*MADE, *COMMITTED])}")
    chosen = options.names or [*(COMMITTED if options.check else MADE)]
    try:
        made = {file: make() for name, (file, make) in MADE.items() if name in chosen and not options.check}
        texts = {name: make() for name, (_, make) in COMMITTED.items() if name in chosen}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    outdated = [name for name, text in texts.items() if COMMITTED[name][0].read_text() != text]
    for name in outdated:
        path = COMMITTED[name][0]
        if options.check:
            print(f"{path.relative_to(ROOT)} is out of date: python docs/make.py {name}", file=sys.stderr)
        else:
            path.write_text(texts[name])
    if made:
        # What is made of other sources than the rest goes, and all of it may be packed.
        if is_all := made.keys() == {file for file, _ in MADE.values()}:
            made[contract.SOURCES] = f"{contract.digest()}\n"
        old = [path.name for path in contract.MADE.glob("*") if path.name not in made]
        deleted = old if is_all else [contract.SOURCES]
        folders.write(
            contract.MADE, {name: linked(text, contract.MADE) for name, text in made.items()}, deletes=deleted
        )
    return int(options.check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
