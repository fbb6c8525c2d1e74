"""The contract as data: its versions, requirements and profiles, and the list of the items of a version.

docs/contract.md is read, of which a wheel and an sdist have a copy. The list of a closed version is a file of the
package; that of an open one is made from the suites when it is first asked for, and again when they have changed.
Imports neither torch nor the harness; the build of a wheel runs this file by its path.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).parent

#: A clone has the page in docs/, and what is made from it and the suites where git ignores it.
_IS_CLONE = not (PACKAGE / "contract.md").exists()

PAGE = PACKAGE.parent / "docs/contract.md" if _IS_CLONE else PACKAGE / "contract.md"
"""The contract as people read it."""

MADE = PACKAGE.parent / "out/docs" if _IS_CLONE else PACKAGE / "docs"
"""The folder of the pages that ``python docs/make.py`` makes, and of the list of an open version."""

SOURCES = "sources.txt"
"""The file of that folder with :func:`digest` of the sources of which all of it was made."""

#: The folders of the package on which the items of an open version depend.
_OF_ITEMS = ("harness", "suites", "testing")

Chapter = tuple[str, str, list[tuple[str, str, bool]]]
"""Name, subject, and of each requirement the id, the text and whether it is of *any*."""

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


CLASSES = {
    "cpu-4": HardwareClass(4, frozenset()),
    "nccl-2": HardwareClass(2, frozenset({"accelerator", "streams"})),
    "accelerator-2": HardwareClass(2, frozenset({"accelerator"})),
}
"""The hardware classes by name."""


def class_of(device: str, *, has_nccl: bool) -> str:
    """Return the hardware class of a run by the device type of its ranks; empty if the type is not known."""
    if device in ("", "cpu", "mixed"):
        return "cpu-4" if device == "cpu" else ""
    return "nccl-2" if has_nccl else "accelerator-2"


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


class NoList(ValueError):
    """The items of an open version are not known, because the suites cannot be collected here: the text says why."""


def read_versions(page: str) -> dict[str, str]:
    """Read the commit of each version from the page, the newest first; that of an open one is empty."""
    return dict(re.findall(r"^\| (\d{4}\.\d+) \| `?(\w*)`? *\|", page, flags=re.MULTILINE))


def read_profiles(page: str) -> dict[str, Profile]:
    """Read the profiles from the page: for whom each is, its classes, what is sharded, capabilities, requirements."""
    found = {}
    for name, row in re.findall(r"^\| `([a-z][\w-]*)` \| (.*) \|$", page, flags=re.MULTILINE):
        subject, *lists = row.split(" | ")
        found[name] = Profile(subject, *(frozenset(re.findall(r"[\w.-]+", one)) for one in lists))
    return found


def read_chapters(page: str) -> list[Chapter]:
    """Read the chapters from the page; their names are in capitals, as in the ids of their requirements."""
    found = []
    for part in page.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        name, colon, subject = title.partition(": ")
        rows = re.findall(r"^\| ([A-Z]+-\d+) \| *(any)? *\| (.*) \|$", body, flags=re.MULTILINE)
        if colon and rows:
            found.append((name, subject, [(id_, text, bool(of_any)) for id_, of_any, text in rows]))
    return found


@functools.cache
def versions() -> Mapping[str, str]:
    """Return the commit of each version of the contract, the newest first; that of an open version is empty."""
    return read_versions(_page())


def version() -> str:
    """Return the newest version, which is that of this code."""
    return next(iter(versions()))


def version_of(said: str) -> str:
    """Return the version whose items a run is counted by, from its ``environment.contract``.

    The list of a closed version stays, so that items of a later version do not count as lacking. Runs from before the
    first version, and merged runs of several versions, are counted by the first.
    """
    return said if said in versions() else [*versions()][-1]


@functools.cache
def chapters() -> list[Chapter]:
    """Return the chapters, in order."""
    return read_chapters(_page())


@functools.cache
def profiles() -> Mapping[str, Profile]:
    """Return the profiles by name, in the order of the contract."""
    return read_profiles(_page())


@functools.cache
def items(of: str | None = None) -> Mapping[str, Item]:
    """Return the items of a version, by default of the newest one, by the ids that they have in run files.

    Raises:
        NoList: the version is open, and its items cannot be collected here.
    """
    number = of or version()
    closed = PACKAGE / f"contract-{number}.tsv"
    return read_items(closed.read_text(encoding="utf-8") if closed.exists() else _open_list(number))


def read_items(text: str) -> Mapping[str, Item]:
    """Read a list of items: a line for each case and what its items need, and below it the ends of their ids.

    The names of an older version become those of today, which suites and profiles have.
    """
    from shardproof import renamed  # late: the build of a wheel runs this file by its path

    found = {}
    for line in text.splitlines():
        function, *words = line.split("\t")
        if function:
            case, common = function, [tuple(one for one in word.split(", ") if one != "-") for word in words]
        else:
            requirements, needs, hardware = common
            ranks = int(words[0].partition("-")[0].removeprefix("w"))
            needed = frozenset(new for one in needs for new in renamed.needed(one))
            found[renamed.item(f"{case}[{words[0]}]")] = Item(requirements, ranks, needed, frozenset(hardware))
    return found


def items_of_profile(name: str, hardware: str, *, of: str | None = None) -> frozenset[str]:
    """Return the ids of the items of a profile that a hardware class can have, in a version, by default the newest."""
    return frozenset(id_ for id_, item in items(of).items() if profiles()[name].has(item, hardware))


def named(profiles: str) -> list[str]:
    """Return the names of the profiles of a run, which its command and its run file have separated by commas."""
    return [name for one in profiles.split(",") if (name := one.strip())]


@functools.cache
def _page() -> str:
    return PAGE.read_text(encoding="utf-8")


def digest() -> str:
    """Return a hash of the sources on which the items of an open version depend."""
    found = hashlib.sha256()
    for folder in _OF_ITEMS:
        root = (PACKAGE / folder).resolve()
        for path in sorted(path for pattern in ("*.py", "*.toml") for path in root.rglob(pattern)):
            content = path.read_bytes()
            found.update(f"{folder}/{path.relative_to(root)}\0{len(content)}\0".encode())
            found.update(content)
    return found.hexdigest()[:16]


def list_of(number: str) -> Path:
    """Return the file in which the list of an open version is kept: a line with :func:`digest`, then the items."""
    return MADE / f"contract-{number}.tsv"


def made_pages() -> list[Path]:
    """Return the pages in :data:`MADE` and the list of an open version, if all were made of these sources."""
    note = MADE / SOURCES
    return sorted(MADE.iterdir()) if note.exists() and note.read_text(encoding="utf-8").strip() == digest() else []


def _open_list(number: str) -> str:
    """Return the list of an open version, collected by a process of its own unless that of these sources is there."""
    sources = digest()
    if (known := _kept(number, sources)) is not None:
        return known
    lacking = [name for name in ("torch", "pytest") if importlib.util.find_spec(name) is None]
    if lacking:
        raise NoList(f"contract {number} is open: its items are collected, which needs {' and '.join(lacking)}")
    with PAGE.open("rb") as page:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(page, fcntl.LOCK_EX)  # of the processes that ask at one time, one collects
        known = _kept(number, sources)
        return _collected(number, sources) if known is None else known


def _kept(number: str, sources: str) -> str | None:
    path = list_of(number)
    made, _, text = path.read_text(encoding="utf-8").partition("\n") if path.exists() else ("", "", "")
    return text if made == sources else None


def _collected(number: str, sources: str) -> str:
    # Without what makes a process one of this run of pytest, or a rank of torchrun.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TORCHELASTIC_"))}
    paths = filter(None, [str(PACKAGE.parent), kept.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, "-m", "shardproof.listing", number, sources],
        env=kept | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        *_, last = ["", *(done.stdout + done.stderr).strip().splitlines()]
        raise NoList(f"contract {number} is open, and its items cannot be collected: {last}")
    return done.stdout
