"""The releases of torch that shardproof runs with: the oldest of each part, and the newest that is tested.

The doctor, recordings, comparisons, states and checks need hooks. The suites and their drivers need FSDP2 as it is
since 2.11. Nothing here imports torch: a refusal comes before an import that takes seconds.
"""

import importlib.util
import re
from pathlib import Path

OLDEST = (2, 9)
"""What the package requires, and with what the commands run that need no suite."""

OLDEST_OF_SUITES = (2, 11)
"""What ``run``, ``plan`` and ``reproduce``, cases under pytest and the reference implementation need."""

NEWEST = (2, 15)
"""The newest release that is tested."""


def text(release: tuple[int, ...]) -> str:
    """Return a release as torch writes it."""
    return ".".join(map(str, release))


def release_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; empty if it has none.

    The rest does not count: 2.11.0a0+git1234567 is a 2.11.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return () if found is None else tuple(map(int, found.groups()))


def installed() -> str:
    """Return the version of the torch that an import would find, from its file; empty if there is none."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder, "version.py")
        if file.is_file() and (found := re.search(r"^__version__ = '([^']*)'", file.read_text("utf-8"), re.MULTILINE)):
            return found[1]
    return ""


def refusal(who: str) -> str:
    """Return why the installed torch is too old for the suites and what drives them, in one line; empty if it is not.

    Args:
        who: the command or the part that needs a newer one.
    """
    version = installed()
    release = release_of(version)
    if not release or release >= OLDEST_OF_SUITES:
        return ""
    return (
        f"{who} needs torch {text(OLDEST_OF_SUITES)} or later, and torch {version} is installed; doctor, record, "
        f"compare, state and check run with torch {text(OLDEST)} or later"
    )
