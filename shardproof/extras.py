"""How to install what an extra of shardproof has, in words that hold for a clone, a wheel and a git URL."""

import contextlib
import shlex
import tomllib
from importlib import metadata
from pathlib import Path


def lacking(who: str, extra: str, error: ModuleNotFoundError) -> str:
    """Return in one line what ``who`` needs, after the import of a package of the extra has failed.

    Raises:
        ModuleNotFoundError: what is missing is no package of the extra, but of shardproof.
    """
    package = (error.name or "").partition(".")[0]
    if package == "shardproof":
        raise error
    return f"{who} needs packages that are not installed; install them with: {command(extra)} ({package} is missing)"


def command(extra: str) -> str:
    """Return the command that installs what the extra has, by its own names: no index needs to have shardproof."""
    required: list[str] = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        required = metadata.requires("shardproof") or []
    marks = (f'extra == "{extra}"', f"extra == '{extra}'")
    names = [line.partition(";")[0].strip() for line in required if line.endswith(marks)]
    if not names:  # a clone that is not installed
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
        names = project["project"]["optional-dependencies"][extra]
    return f"pip install {shlex.join(names)}"
